"""The folder in which a machine's sessions outlive its processes, and the lock that gives it to one service."""

import fcntl
import os
import shutil
from pathlib import Path

REDIS_SERVER = "redis-server"
REMEDY = "give another one with --state-dir, or --store memory to keep sessions in memory"


def redis_server() -> str | None:
    """Return the path of this machine's redis-server, or None."""
    return shutil.which(REDIS_SERVER)


def store_folder(state_dir: Path | None) -> Path:
    """Return the embedded store's folder: in `state_dir`, or where the XDG base directories say."""
    if state_dir is None:
        state_dir = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state") / "specdec"
    return state_dir.expanduser().absolute() / "store"


class FolderLock:
    """A folder that one service has, until all processes that hold the descriptor have ended."""

    def __init__(self, folder: Path) -> None:
        """Make the folder and lock it. Raises ValueError, with one sentence, where it cannot be had."""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ValueError(f"the state folder {folder} cannot be written ({error.strerror}); {REMEDY}") from None
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self.descriptor, 20, 0).decode(errors="replace").strip()
            os.close(self.descriptor)
            raise FolderInUse(f"another specdec (process {holder}) has the state folder {folder}; {REMEDY}") from None
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Give the folder back."""
        os.close(self.descriptor)


class FolderInUse(ValueError):
    """Another process has the folder."""
