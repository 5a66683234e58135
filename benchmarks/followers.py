"""Followers at two coordinators over one Redis: what the second one costs, and how long a client waits for a takeover.

python -m benchmarks.followers --turns 6 --kills 5

In turns a session is followed at one coordinator, then the same one at two: the epochs that it took, and the speed.
Then the coordinator that runs a session is killed, and the gap between two chunks at its client is measured.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from benchmarks.measure import hardware
from benchmarks.open_loop import redis_server
from benchmarks.served import demo_pair
from specdec import AsyncClient, SamplingParams, SpeculationParams, UnavailableError
from specdec.serving.child import Child, print_errors
from specdec.serving.local import Options, running
from specdec.serving.local.commands import coordinator_command, environment_of

PROMPT = "def fibonacci(n):"
MAX_START_S = 120.0
PLAIN = SpeculationParams(num_draft_tokens=0)  # drafted, a text that repeats itself is over after some chunks


@dataclass(slots=True)
class Coordinators:
    """Two coordinators of the same store and workers."""

    options: Options
    target_ports: Sequence[int]
    draft_ports: Sequence[int]
    children: list[Child]

    async def start(self, port: int = 0) -> Child:
        """Start one, and return once it answers."""
        command = coordinator_command(replace(self.options, port=port), self.target_ports, self.draft_ports)
        environment = environment_of(command, os.environ)
        child = await Child.start(command.name, command.module, command.flags, environment, print_errors)
        self.children.append(child)
        async with AsyncClient(f"127.0.0.1:{await child.port}", connect_timeout_s=MAX_START_S) as client:
            await client.get_model(timeout_s=MAX_START_S)
        return child


@asynccontextmanager
async def two_coordinators() -> AsyncIterator[Coordinators]:
    """Run a redis-server, the demo pair's workers, and two coordinators."""
    async with redis_server() as url:
        options = replace(demo_pair().options, store=url)
        async with running(options, print_errors) as stack:
            ports = {child.name: child.port.result() for child in stack.children}
            coordinators = Coordinators(options, [ports["target worker"]], [ports["draft worker"]], [])
            try:
                await coordinators.start()
                await coordinators.start()
                yield coordinators
            finally:
                await asyncio.gather(*(child.stop(5.0) for child in coordinators.children))


async def followed(clients: Sequence[AsyncClient], num_tokens: int, name: str) -> tuple[float, int]:
    """Follow one session with each of the clients; return the tokens a second until all have it, and its epochs."""
    sampling = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
    began_s = time.perf_counter()
    asked = [client.complete(PROMPT, sampling=sampling, speculation=PLAIN, request_id=name) for client in clients]
    texts = await asyncio.gather(*asked)
    elapsed_s = time.perf_counter() - began_s
    assert len({text.tokens for text in texts}) == 1
    session = await clients[0].get_session(texts[0].session_id)
    return num_tokens / elapsed_s, session.epoch


async def gap_s(owner: Child, other: AsyncClient, num_tokens: int, name: str) -> tuple[float, int]:
    """Kill the coordinator that runs a session, and resume it at the other one.

    Return the seconds between the last chunk of the one and the first of the other, and the epochs.
    """
    sampling = SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
    await other.get_model()
    seen, offset, digest, last_s, gap = 0, 0, b"", 0.0, 0.0
    async with AsyncClient(f"127.0.0.1:{await owner.port}", max_retries=0) as client:
        stream = client.generate(PROMPT, sampling=sampling, speculation=PLAIN, request_id=name)
        with suppress(UnavailableError):
            async for chunk in stream:
                last_s, seen, offset, digest = time.perf_counter(), seen + 1, chunk.end, chunk.digest
                if seen == 10:
                    owner.kill()
    assert stream.session_id
    async with other.resume(stream.session_id, offset=offset, digest=digest) as rest:
        async for _ in rest:
            gap = time.perf_counter() - last_s
            break
    await other.resume(stream.session_id).result()
    return gap, (await other.get_session(stream.session_id)).epoch


async def measure(options: argparse.Namespace) -> None:
    """Measure and print."""
    print(hardware())
    async with two_coordinators() as service:
        first, second = [await child.port for child in service.children]
        async with AsyncClient(f"127.0.0.1:{first}") as one, AsyncClient(f"127.0.0.1:{second}") as other:
            await followed([one, other], options.tokens, "warm up")
            ratios, epochs = list[float](), list[int]()
            for number in range(options.turns):
                alone, _ = await followed([one], options.tokens, f"alone {number}")
                both, epoch = await followed([one, other], options.tokens, f"both {number}")
                ratios.append(both / alone)
                epochs.append(epoch)
                print(f"turn {number}: one follower {alone:.1f} tokens/s, two {both:.1f}, epochs {epoch}", flush=True)
        if ratios:
            print(f"two followers: {statistics.median(ratios):.3f} times the speed of one (median), epochs {epochs}")
        gaps = list[float]()
        async with AsyncClient(f"127.0.0.1:{second}") as other:
            for number in range(options.kills):
                owner = service.children[-1] if number else service.children[0]
                gap, epoch = await gap_s(owner, other, options.tokens, f"kill {number}")
                gaps.append(gap)
                print(f"kill {number}: {gap:.2f} s between two chunks, epochs {epoch}", flush=True)
                await owner.ended
                await service.start()
        if gaps:
            print(f"a coordinator killed: {statistics.median(gaps):.2f} s at the client (median of {len(gaps)})")


def main() -> None:
    """Parse the flags and measure."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.followers", description=__doc__)
    parser.add_argument("--turns", type=int, default=6, help="pairs of sessions: one follower, then two")
    parser.add_argument("--kills", type=int, default=5, help="coordinators that are killed")
    parser.add_argument("--tokens", type=int, default=480, help="of each session")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
