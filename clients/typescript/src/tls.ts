/** Certificates and keys in files: read together, checked to fit together, and read again when they are replaced. */

import { X509Certificate, createPrivateKey } from "node:crypto";
import { readFileSync, statSync } from "node:fs";

/** PEM files: whom to trust (left out: the authorities that Node brings), and one's own certificate and key. */
export interface TlsFiles {
  readonly ca?: string | undefined;
  readonly certificate?: string | undefined;
  readonly key?: string | undefined;
}

/** PEM texts; null: not given. */
export interface TlsContents {
  readonly ca: Buffer | null;
  readonly certificate: Buffer | null;
  readonly key: Buffer | null;
}

/** The last usable contents of files that may be replaced. */
export class WatchedTls {
  readonly #files: TlsFiles;
  #signature: string;
  #contents: TlsContents;

  /** Throws Error if the files cannot be used now. */
  constructor(files: TlsFiles) {
    refuseHalfPair(files);
    this.#files = files;
    this.#signature = signatureOf(files);
    this.#contents = contentsOf(files);
  }

  /** The contents of now; the last ones while the files cannot be used. The same object while nothing changed. */
  get contents(): TlsContents {
    try {
      const signature = signatureOf(this.#files);
      if (signature !== this.#signature) {
        this.#contents = contentsOf(this.#files);
        this.#signature = signature;
      }
    } catch {
      // half-written files: the next call looks again
    }
    return this.#contents;
  }
}

function refuseHalfPair({ certificate, key }: TlsFiles): void {
  if ((certificate === undefined) === (key === undefined)) return;
  throw new Error(`the ${key === undefined ? "key" : "certificate"} is missing; give certificate and key together`);
}

function signatureOf(files: TlsFiles): string {
  const paths = [files.ca, files.certificate, files.key].filter((path) => path !== undefined);
  return paths
    .map((path) => statSync(path, { bigint: true }))
    .map((stat) => `${stat.ino} ${stat.size} ${stat.mtimeNs}`)
    .join();
}

function contentsOf(files: TlsFiles): TlsContents {
  const { ca, certificate, key } = files;
  const contents = { ca: read(ca), certificate: read(certificate), key: read(key) };
  if (contents.ca) check(`the ca ${ca}`, () => new X509Certificate(contents.ca ?? ""));
  if (contents.certificate) check(`the certificate ${certificate} with the key ${key}`, () => checkPair(contents));
  return contents;
}

function read(path: string | undefined): Buffer | null {
  return path === undefined ? null : readFileSync(path);
}

/** grpc takes a key that belongs to another certificate, and then every handshake fails. */
function checkPair({ certificate, key }: TlsContents): void {
  const fits = new X509Certificate(certificate ?? "").checkPrivateKey(createPrivateKey(key ?? ""));
  if (!fits) throw new Error("the key is another certificate's");
}

function check(what: string, load: () => void): void {
  try {
    load();
  } catch (error) {
    const problem = error instanceof Error ? error.message : String(error);
    throw new Error(`${what} cannot be used (${problem}); give PEM files`);
  }
}
