// Reads server-sent events, as /v1 writes them: lines of `data: JSON`, comments, and `[DONE]` at the end.

/** Yields the content of each event. Throws if the stream ends without saying that it is whole. */
export async function* events(body) {
  for await (const line of lines(body)) {
    if (!line.startsWith("data: ")) continue;
    const content = line.slice("data: ".length);
    if (content === "[DONE]") return;
    yield JSON.parse(content);
  }
  throw new Error("The answer broke off before its end. Try again.");
}

async function* lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const whole = (rest + value).split("\n");
    rest = whole.pop();
    yield* whole;
  }
}
