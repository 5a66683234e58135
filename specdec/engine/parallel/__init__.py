"""One model in several processes, each with a share of its weights: rank 0 leads, the others compute its forwards."""

from specdec.engine.parallel.dividing import check_device, check_divisible, share_options
from specdec.engine.parallel.following import follow
from specdec.engine.parallel.group import RENDEZVOUS_VARIABLE, Group, GroupLost, Place, place_in
from specdec.engine.parallel.leading import leading
from specdec.engine.parallel.messages import END

__all__ = [
    "END",
    "RENDEZVOUS_VARIABLE",
    "Group",
    "GroupLost",
    "Place",
    "check_device",
    "check_divisible",
    "follow",
    "leading",
    "place_in",
    "share_options",
]
