"""What to run on this machine, and how it is said that it cannot be run."""

from dataclasses import dataclass
from typing import get_args

from specdec.serving.settings import Device, DraftQuantization, Dtype, HeadKind, TargetQuantization

NO_DRAFT = "none"
HEADS: tuple[str, ...] = get_args(HeadKind)  # drafters with a head that was trained for the target
MODEL_FREE = ("recycle", "ngram", "suffix")  # drafters that need no model
ADDRESS_VARIABLE = "SPECDEC_ADDRESS"  # the command's own, which no service knows


class CannotRun(Exception):
    """The services cannot be started, or one of them ended. The message is for the user."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Options:
    """What to run. `draft` is a model, a drafter that needs none, or "none" for plain decoding."""

    target: str
    draft: str = MODEL_FREE[0]
    eagle3_head: str | None = None  # folder or hub id, as of the other heads; heads come before `draft`
    dflash_head: str | None = None
    medusa_head: str | None = None
    host: str = "127.0.0.1"  # of coordinator and gateway; workers are always on loopback
    port: int = 50051  # 0 takes a free one
    http_port: int | None = None  # of the gateway, on the same host; 0 takes a free one, None: no gateway
    store: str = "embedded"
    state_dir: str | None = None  # of the embedded store; None: the user's own
    dtype: Dtype = "auto"
    device: Device = "auto"
    quantization: TargetQuantization = "none"  # of the target
    draft_quantization: DraftQuantization = "none"
    num_targets: int = 1
    num_drafts: int = 1
    target_threads: int | None = None
    draft_threads: int | None = None
    metrics_ports: int | None = None  # the first of consecutive ones: coordinator, targets, drafts, gateway
    drain_s: float = 5.0
    insecure: bool = False  # plain text also where others can listen

    @property
    def heads(self) -> dict[str, str]:
        """Return the heads to draft with, by the drafter's name."""
        given = {"eagle3": self.eagle3_head, "dflash": self.dflash_head, "medusa": self.medusa_head}
        return {name: head for name, head in given.items() if head}
