"""Processes whose life is tied to the one that started them.

`python -m specdec.serving.tied PARENT_PID COMMAND...` asks the kernel for SIGKILL when its parent dies, however that
happens, and then becomes the command. Only Linux has that (PR_SET_PDEATHSIG): elsewhere the children of a parent that
was itself killed with SIGKILL stay. Any other end of the parent ends them everywhere.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """Tie this process's life to its parent's."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that started this service has ended")


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
