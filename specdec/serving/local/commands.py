"""The services as commands: their flags, and the environment that each of them gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from specdec.serving.local.options import MODEL_FREE, NO_DRAFT, Options
from specdec.serving.processors import MAX_SPARE
from specdec.serving.settings import ENV_PREFIX, settings_of, variable_names

# workers compute for as long as they are let; what answers clients, on the same cores, needs a moment now and then.
# With 10 they starve where something else is busy too, and drafts come too late
WORKER_NICENESS = 5
DEVICES = Path("/dev")  # where a driver shows its GPUs


@dataclass(frozen=True, slots=True)
class Command:
    """One service to start."""

    name: str
    module: str
    flags: tuple[str, ...]
    num_threads: int = 1
    defaults: Mapping[str, str] = field(default_factory=dict)  # settings, unless the environment says otherwise
    variables: Mapping[str, str] = field(default_factory=dict)  # what must not be on a command line

    @property
    def kind(self) -> str:
        """Return "coordinator", "target", "draft" or "gateway"."""
        return self.name.partition(" ")[0]

    def at_port(self, port: int) -> "Command":
        """Return the same service on a port that others know already; the last of two flags counts."""
        return replace(self, flags=(*self.flags, "--port", str(port)))


def default_threads(num_cores: int) -> tuple[int, int]:
    """Return threads of the target and of the draft: a core is left for the others, and small models gain little."""
    return max(1, num_cores // 2), max(1, min(4, num_cores // 4))


def worker_commands(options: Options, num_cores: int) -> list[Command]:
    """Return the workers to start, targets first."""
    target_threads, draft_threads = default_threads(num_cores)
    options = replace(
        options,
        target_threads=options.target_threads or target_threads,
        draft_threads=options.draft_threads or draft_threads,
        num_drafts=options.num_drafts if options.draft != NO_DRAFT else 0,
    )
    ports = count((options.metrics_ports or 0) + 1)
    needed = {"niceness": str(WORKER_NICENESS)}
    ahead = {} if _has_idle_cores(options, num_cores) else {"draft_ahead": "false"}
    return [
        *(_worker("target", options, needed, ports, number) for number in range(options.num_targets)),
        *(_worker("draft", options, needed | ahead, ports, number) for number in range(options.num_drafts)),
    ]


def _has_idle_cores(options: Options, num_cores: int) -> bool:
    """Return whether drafts can be computed while targets compute, without taking cores from them.

    On a CPU a target takes helpers beside its threads. Two cores that both workers use: drafting ahead cost more than
    it hid (docs/benchmarks.md).
    """
    if options.device == "cuda" or (options.device == "auto" and any(DEVICES.glob("nvidia[0-9]*"))):
        return True
    target_cores = min(num_cores, (options.target_threads or 1) + MAX_SPARE)
    draft_cores = options.draft_threads or 1
    return options.num_targets * target_cores + options.num_drafts * draft_cores <= num_cores


def _worker(kind: str, options: Options, defaults: Mapping[str, str], ports: "count[int]", number: int) -> Command:
    num_threads = (options.target_threads if kind == "target" else options.draft_threads) or 1
    model = _target_flags(options) if kind == "target" else _draft_flags(options)
    flags = (
        *model,
        *("--host", "127.0.0.1", "--port", "0", "--dtype", options.dtype, "--device", options.device),
        *("--num-threads", str(num_threads)),
        *_common_flags(options, next(ports)),
    )
    name = f"{kind} worker {number + 1}" if number else f"{kind} worker"
    return Command(name, f"{kind}_service", flags, num_threads, defaults)


def _target_flags(options: Options) -> tuple[str, ...]:
    """A target worker drafts with the first head itself, too."""
    head = next(((("--head-kind", kind, "--head", head)) for kind, head in options.heads.items()), ())
    return ("--model", options.target, "--quantization", options.quantization, *head)


def _draft_flags(options: Options) -> tuple[str, ...]:
    """A draft worker offers what needs no model too, so that each request can choose; what was asked for is first."""
    has_model = options.draft not in MODEL_FREE
    drafters = ",".join(dict.fromkeys([*options.heads, "model" if has_model else options.draft, *MODEL_FREE]))
    model = ("--model", options.draft, "--target-tokenizer", options.target) if has_model else ()
    rounding = ("--draft-quantization", options.draft_quantization)
    return ("--drafters", drafters, *model, *rounding, *_head_flags(options), "--suffix-tokenizer", options.target)


def _head_flags(options: Options) -> tuple[str, ...]:
    flags = [part for name, head in options.heads.items() for part in (f"--{name}-head", head)]
    return (*flags, "--head-target", options.target) if flags else ()


def _common_flags(options: Options, metrics_port: int) -> tuple[str, ...]:
    metrics = ("--metrics-port", str(metrics_port)) if options.metrics_ports is not None else ()
    return (*metrics, "--drain-s", str(options.drain_s))


def coordinator_command(options: Options, target_ports: Sequence[int], draft_ports: Sequence[int]) -> Command:
    """Return the coordinator to start before these workers."""
    flags = (
        *("--host", options.host, "--port", str(options.port)),
        *("--tokenizer", options.target, "--target", _addresses(target_ports), "--draft", _addresses(draft_ports)),
        *_common_flags(options, options.metrics_ports or 0),
        *(("--state-dir", options.state_dir) if options.state_dir else ()),
        *(("--insecure",) if options.insecure else ()),
    )
    # every user of the machine can read command lines, and a Redis URL may hold a password
    variables = {f"{ENV_PREFIX}STORE": options.store}
    return Command("coordinator", "coordinator", flags, variables=variables)


def gateway_command(options: Options, coordinator: str) -> Command:
    """Return the gateway to start once there is a coordinator at this address."""
    num_workers = len(worker_commands(options, num_cores=1))
    flags = (
        *("--host", options.host, "--port", str(options.http_port)),
        *("--coordinator", coordinator, "--tokenizer", options.target),
        *_common_flags(options, (options.metrics_ports or 0) + 1 + num_workers),
        *(("--insecure",) if options.insecure else ()),
    )
    return Command("gateway", "gateway", flags)


def _addresses(ports: Sequence[int]) -> str:
    return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports) if ports else ""


def environment_of(command: Command, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a service: its own settings only, as each refuses what it does not know.

    Threads that wait must not spin: with as many processes as cores they would take each other's.
    """
    mine = variable_names(settings_of(command.module))
    kept = {name: value for name, value in environment.items() if not name.startswith(ENV_PREFIX) or name in mine}
    defaults = {
        "OMP_NUM_THREADS": str(command.num_threads),
        "OMP_WAIT_POLICY": "passive",
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONUNBUFFERED": "1",
        "TQDM_DISABLE": "1",  # its bars are no lines
    }
    defaults |= {f"{ENV_PREFIX}{name.upper()}": value for name, value in command.defaults.items()}
    return defaults | kept | dict(command.variables)
