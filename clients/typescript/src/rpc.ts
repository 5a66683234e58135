/** Calls of the services' methods over grpc-js, with the messages of protobuf-es. */

import {
  create,
  fromBinary,
  toBinary,
  type DescMessage,
  type DescMethodServerStreaming,
  type DescMethodUnary,
  type MessageShape,
} from "@bufbuild/protobuf";
import type { CallOptions, Client, ClientReadableStream, Metadata } from "@grpc/grpc-js";

/** Calls a method that answers with a stream. The call is to be cancelled when it is no longer read. */
export function callStream<I extends DescMessage, O extends DescMessage>(
  client: Client,
  method: DescMethodServerStreaming<I, O>,
  request: MessageShape<I>,
  metadata: Metadata,
  options: CallOptions,
): ClientReadableStream<MessageShape<O>> {
  const call = client.makeServerStreamRequest(
    pathOf(method),
    (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
    (bytes: Buffer) => fromBinary(method.output, bytes),
    request,
    metadata,
    options,
  );
  call.on("error", () => undefined); // of a call that is cancelled, whose errors nobody reads
  return call;
}

/** Calls a method that answers once. Throws ServiceError. */
export async function callUnary<I extends DescMessage, O extends DescMessage>(
  client: Client,
  method: DescMethodUnary<I, O>,
  request: MessageShape<I>,
  metadata: Metadata,
  options: CallOptions,
  signal: AbortSignal,
): Promise<MessageShape<O>> {
  let cancel = (): void => undefined;
  const answered = new Promise<MessageShape<O>>((resolve, reject) => {
    const call = client.makeUnaryRequest(
      pathOf(method),
      (message: MessageShape<I>) => Buffer.from(toBinary(method.input, message)),
      (bytes: Buffer) => fromBinary(method.output, bytes),
      request,
      metadata,
      options,
      (error, answer) => (error ? reject(error) : resolve(answer ?? create(method.output))),
    );
    cancel = () => call.cancel();
  });
  signal.addEventListener("abort", cancel);
  try {
    return await answered;
  } finally {
    signal.removeEventListener("abort", cancel);
  }
}

function pathOf(method: { readonly parent: { readonly typeName: string }; readonly name: string }): string {
  return `/${method.parent.typeName}/${method.name}`;
}
