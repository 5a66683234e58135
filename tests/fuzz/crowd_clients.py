"""The clients of a crowd, a process of their own: `python -m tests.fuzz.crowd_clients ADDRESS MESSAGES SEED`.

What they take to send must not delay a neighbour, or the liars that its messages pass. It says that it is ready, sends
once it has read a line, and prints how the requests ended.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable

import grpc

from specdec.channel import MAX_REQUEST_BYTES, PATIENT_PINGS, REQUEST_BYTES, open_channel
from specdec.v1 import generation_pb2, generation_pb2_grpc

NUM_CLIENTS = 24
SLACK_BYTES = 1 << 10  # of a request, for what is not the prompt
TIMEOUT_S = 60.0


def _text() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="t1 " * ((REQUEST_BYTES - SLACK_BYTES) // 3))


def _too_large() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="t1 " * ((MAX_REQUEST_BYTES - SLACK_BYTES) // 3))


def _one_word() -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="x" * (REQUEST_BYTES - SLACK_BYTES))


def _tokens() -> generation_pb2.GenerateRequest:
    ids = [300] * ((REQUEST_BYTES - SLACK_BYTES) // 2)
    return generation_pb2.GenerateRequest(tokens=generation_pb2.TokenSequence(ids=ids))


def _chat() -> generation_pb2.GenerateRequest:
    content = "t1 " * ((REQUEST_BYTES - (16 << 10)) // (3 * 1000))
    messages = [generation_pb2.ChatMessage(role="user", content=content)] * 1000
    return generation_pb2.GenerateRequest(chat=generation_pb2.ChatPrompt(messages=messages))


LARGEST: tuple[Callable[[], generation_pb2.GenerateRequest], ...] = (_text, _one_word, _tokens, _chat, _too_large)


def main() -> None:
    """Send the requests; print `{"<prompt> <status code>": count}`."""
    address, num_messages, seed = sys.argv[1:]
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(asyncio.run(_send_all(address, int(num_messages), random.Random(int(seed))))))


async def _send_all(address: str, num_messages: int, rng: random.Random) -> Counter[str]:
    left, requests, codes = iter(range(num_messages)), [make() for make in LARGEST], Counter[str]()

    async def send() -> None:
        async with open_channel(address, pings=PATIENT_PINGS) as channel:  # as our client sends large requests
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            for _ in left:
                request = rng.choice(requests)
                code = await _send(stub, request)
                codes[f"{request.WhichOneof('prompt')} {code.name}"] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(send())
    return codes


async def _send(stub: object, request: generation_pb2.GenerateRequest) -> grpc.StatusCode:
    try:
        await stub.Generate(request, timeout=TIMEOUT_S).read()  # type: ignore[attr-defined]  # the asynchronous stub
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


if __name__ == "__main__":
    main()
