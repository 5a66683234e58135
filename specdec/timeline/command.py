"""The command `specdec trace`: one request, through services that run or are started for it, and its phases."""

import argparse
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.arguments import add_sampling_flags, checked, sampling_of
from specdec.client import AsyncClient
from specdec.completion import Finish
from specdec.parameters import WholeNumber
from specdec.security_flags import security_of
from specdec.timeline.chrome import chrome_trace
from specdec.timeline.clocks import aligned
from specdec.timeline.errors import TraceError
from specdec.timeline.local_services import local_services
from specdec.timeline.phases import phases, table
from specdec.timeline.recorded import CLIENT, REQUEST, Recorded, SpanTree
from specdec.types import MAX_DRAFT_TOKENS, SpeculationParams

if TYPE_CHECKING:
    from specdec.timeline.receiver import SpanReceiver

COLLECTOR = "127.0.0.1:4317"  # where services send spans to unless they are told otherwise
QUIET_S = 12.0  # without another span, until the rest is given up: services send what they have every 5 s
DEFAULT_TOKENS = 64
DESCRIPTION = (
    "Generate once, and write where the time went: a file for https://ui.perfetto.dev with every phase of every round "
    "in the client, the coordinator and the workers, and a table of phases. With --target services are started for it; "
    "without, those at --address are asked, and must send their spans here: start them with --otlp-endpoint "
    f"http://{COLLECTOR} (or SPECDEC_OTLP_ENDPOINT)."
)
HELP_OUTPUT = "the file (default: specdec-trace.json)"
Command = Callable[[argparse.Namespace], Coroutine[Any, Any, None]]


def add(commands: Any, finish: Callable[[argparse.ArgumentParser, Command], None]) -> None:
    """Add the command; `finish` adds how to connect, and tells its parser what it runs."""
    trace = commands.add_parser("trace", help="show where a request's time goes", description=DESCRIPTION)
    trace.add_argument("prompt", metavar="PROMPT", help="what to continue")
    trace.add_argument("--output", type=Path, default=Path("specdec-trace.json"), metavar="FILE", help=HELP_OUTPUT)
    trace.add_argument("--target", metavar="DIR|ID", help="start services with this target model, as `specdec up` does")
    trace.add_argument("--draft", metavar="DIR|ID|NAME", help="with --target: what they draft with")
    trace.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help=f"where spans come in (default: {COLLECTOR}; with --target: a free port)",
    )
    count = checked(WholeNumber(0, MAX_DRAFT_TOKENS))
    trace.add_argument("--num-draft-tokens", type=count, metavar="COUNT", help="in a round (default: automatic)")
    trace.add_argument("--drafter", metavar="NAME", help="(default: the service chooses)")
    add_sampling_flags(trace)
    trace.set_defaults(max_new_tokens=DEFAULT_TOKENS)
    finish(trace, run)


async def run(flags: argparse.Namespace) -> None:
    """Generate once, write the file and print the table. Raises TraceError, SpecdecError."""
    async with _receiving(flags) as receiver, _address(flags, receiver) as address:
        asked = await _ask(flags, address)
        tree = await receiver.until_complete(asked.trace_id, QUIET_S)
    requests = tree.named(REQUEST)
    if not requests:
        problem = f"{address} answered, and sent no spans to {receiver.address}"
        raise TraceError(f"{problem}; start its services with --otlp-endpoint http://{receiver.address}")
    whole = aligned(SpanTree([*tree.spans, asked.span]), requests[0].process)
    _write(flags.output, whole)
    print("\n".join([*table(phases(whole)), "", *_summary(flags.output, whole, tree.missing, asked.finish)]))


@asynccontextmanager
async def _receiving(flags: argparse.Namespace) -> AsyncIterator["SpanReceiver"]:
    try:
        from specdec.timeline.receiver import receiving
    except ModuleNotFoundError as error:
        problem = f"`specdec trace` receives OpenTelemetry's spans, and {error.name} is not installed"
        raise TraceError(f"{problem}; run: pip install 'specdec[tracing]'") from None
    async with receiving(flags.listen or ("127.0.0.1:0" if flags.target else COLLECTOR)) as receiver:
        yield receiver


@asynccontextmanager
async def _address(flags: argparse.Namespace, receiver: "SpanReceiver") -> AsyncIterator[str]:
    if flags.draft and not flags.target:
        raise TraceError("--draft starts services, and needs --target; without both, those at --address are asked")
    async with AsyncExitStack() as stack:
        if flags.target:
            models = ["--target", flags.target, *(("--draft", flags.draft) if flags.draft else ())]
            services = local_services(models, f"http://{receiver.address}")
            yield await stack.enter_async_context(services)
        else:
            yield flags.address


@dataclass(frozen=True, slots=True)
class _Asked:
    """The request, as the client saw it."""

    span: Recorded
    finish: Finish | None

    @property
    def trace_id(self) -> str:
        return self.span.trace_id


async def _ask(flags: argparse.Namespace, address: str) -> _Asked:
    """Generate once, in a trace of which every round is wanted."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    metadata = {"traceparent": f"00-{trace_id}-{span_id}-01", "tracestate": "specdec=all"}
    speculation = SpeculationParams(num_draft_tokens=flags.num_draft_tokens, drafter=flags.drafter)
    async with AsyncClient(address, timeout_s=flags.timeout_s, metadata=metadata, **security_of(flags)) as client:
        await client.connect()
        begin_ns = time.time_ns()
        completion = await client.complete(flags.prompt, sampling=sampling_of(flags), speculation=speculation)
        span = Recorded(REQUEST, trace_id, span_id, "", CLIENT, CLIENT, begin_ns, time.time_ns())
    return _Asked(span, completion.finish)


def _write(path: Path, tree: SpanTree) -> None:
    try:
        path.write_text(json.dumps(chrome_trace(tree)) + "\n")
    except OSError as error:
        raise TraceError(f"cannot write {path}: {error.strerror}; give another --output") from None


def _summary(path: Path, tree: SpanTree, missing: str | None, finish: Finish | None) -> Sequence[str]:
    processes = {span.process: span.service for span in tree.spans}
    lines = [f"{path}: {len(tree.spans)} spans of {', '.join(processes.values())}; open it in https://ui.perfetto.dev"]
    if finish:
        sums = finish.statistics
        lines.append(f"{sums.num_tokens} tokens in {sums.num_rounds} rounds, {1000 * sums.total_s:.0f} ms")
    if missing:
        lines.append(f"incomplete: {missing} did not come in time; workers need --otlp-endpoint too")
    return lines
