"""A service's state folder, held by one process at a time."""

import fcntl
import os
from pathlib import Path
from typing import Self

from covey_kit.errors import FailedPrecondition, Reason

__all__ = ["FolderLock"]


class FolderLock:
    """An exclusive lock on a folder, until `release` or the end of the process.

    Raises:
        FailedPrecondition: LIMIT_EXCEEDED, another process holds the folder; names folder and process id.
        OSError: the folder can't be made or written.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.exists():  # what lies in a state folder is nobody else's to read
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._descriptor: int | None = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
            self.release()
            raise FailedPrecondition(
                Reason.LIMIT_EXCEEDED,
                f"{folder} is in use by process {holder}; stop that process or choose another folder",
                resource=("folder", str(folder)),
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode("ascii"), 0)

    def release(self) -> None:
        """Lets go of the folder. May be called twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.release()
