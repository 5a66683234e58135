"""A process that follows: it computes its share of each forward that the leader announces, and nothing else."""

import torch

from specdec.engine.attention import attending
from specdec.engine.model import LanguageModel
from specdec.engine.parallel.group import Group
from specdec.engine.parallel.messages import decode


@torch.inference_mode()
def follow(model: LanguageModel, group: Group) -> None:
    """Compute what the leader announces, until it says that it has ended. Raises GroupLost where it dies."""
    while message := group.receive():
        forward = decode(message)
        for change in forward.changes:
            change.apply(model.backend.pool)
        with attending(model.backend.plan(forward.segments)):
            model.decoder(forward.row)
