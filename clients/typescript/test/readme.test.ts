/** The examples of README.md compile strictly, and run against the services at SPECDEC_ADDRESS. */

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import test from "node:test";

const ROOT = new URL("../../", import.meta.url);
const FOLDER = new URL("dist/readme/", ROOT);
const ADDRESS = "127.0.0.1:50051";
const address = process.env["SPECDEC_ADDRESS"];
const LANGUAGE = ["--ignoreConfig", "--target", "es2022", "--module", "nodenext", "--types", "node"];
const COMPILER = [...LANGUAGE, "--strict", "--noUncheckedIndexedAccess"];

const examples = [...readFileSync(new URL("README.md", ROOT), "utf8").matchAll(/^```ts\n(.*?)^```$/gms)].map(
  ([, program]) => program ?? "",
);

test("the README has examples", () => assert.ok(examples.length >= 2));

for (const [number, program] of examples.entries()) {
  const file = new URL(`example_${number}.mts`, FOLDER);

  test(`example ${number} compiles`, () => {
    mkdirSync(FOLDER, { recursive: true });
    writeFileSync(file, program.replaceAll(ADDRESS, address ?? ADDRESS));
    const compiler = new URL("node_modules/typescript/bin/tsc", ROOT);
    execFileSync(process.execPath, [compiler.pathname, ...COMPILER, file.pathname], { stdio: "pipe", cwd: ROOT });
  });

  test(`example ${number} runs`, { skip: address ? false : "SPECDEC_ADDRESS names no running services" }, () => {
    assert.ok(program.includes(ADDRESS));
    const out = execFileSync(process.execPath, [file.pathname.replace(/mts$/, "mjs")], { encoding: "utf8" });
    assert.ok(out.length > 20, out);
  });
}
