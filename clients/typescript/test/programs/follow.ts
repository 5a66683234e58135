/**
 * A client for tests in another language: reads one call a line from standard input, and prints a line a chunk, then one
 * with the completion or the error. Each line is JSON; a seed is a text, as JSON's numbers end at 2^53.
 *
 *     node follow.js ADDRESS '{"tls": {"ca": "ca.pem"}, "token": "..."}'
 */

import { createInterface } from "node:readline";

import { Client, SpecdecError, type ClientOptions, type GenerateOptions, type Prompt, type Stream } from "specdec";

interface Command {
  readonly prompt?: Prompt;
  readonly sessionId?: string;
  readonly offset?: number;
  readonly options?: Omit<GenerateOptions, "seed"> & { readonly seed?: string };
}

function begin(client: Client, { prompt, sessionId, offset, options }: Command): Stream {
  if (prompt === undefined) return client.resume(sessionId ?? "", { offset });
  const { seed, ...others } = options ?? {};
  return client.generate(prompt, { ...others, seed: seed === undefined ? undefined : BigInt(seed) });
}

async function follow(client: Client, command: Command): Promise<void> {
  try {
    const stream = begin(client, command);
    for (let next = await stream.next(); next.value; next = await stream.next()) {
      const { offset, tokens, text, pieces } = next.value;
      print({ chunk: { offset, tokens, text, pieces } });
    }
    const completion = await stream.result();
    print({ completion: { ...completion, digest: Buffer.from(completion.digest).toString("hex") } });
  } catch (error) {
    if (!(error instanceof SpecdecError)) throw error;
    const { name, message, code, reason } = error;
    print({ error: { name, message, code, reason } });
  }
}

function print(line: object): void {
  process.stdout.write(`${JSON.stringify(line)}\n`);
}

const [address, options] = process.argv.slice(2);
const onRetry = (): void => print({ retry: true });
const client = new Client(address, { ...(JSON.parse(options ?? "{}") as ClientOptions), onRetry });
for await (const line of createInterface(process.stdin)) await follow(client, JSON.parse(line) as Command);
client.close();
