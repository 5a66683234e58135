"""How many processors a worker may use."""

import os
from collections.abc import Sequence
from pathlib import Path

MAX_HELPERS = 255  # that the engine has places for
MAX_SPARE = 7  # helpers that a worker takes by itself; more were not measured
# the version of Linux' cgroups that there is; of the first, quota and period are files of their own
CGROUP_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max",),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def spare_processors(num_threads: int) -> int:
    """Return how many helpers are worth having beside so many threads: one for each processor that they leave."""
    num_processors = int(min(len(os.sched_getaffinity(0)), processor_quota()))
    return max(0, min(num_processors - num_threads, MAX_SPARE))


def processor_quota(quotas: Sequence[Sequence[str]] = CGROUP_QUOTAS) -> float:
    """Return how many processors' time Linux lets this container use; infinity where it sets no limit."""
    for paths in quotas:
        try:
            quota, period = map(float, " ".join(Path(path).read_text() for path in paths).split())
        except (OSError, ValueError):  # another version, or "max"
            continue
        if quota > 0:
            return quota / period
    return float("inf")
