"""Files that are either whole or not there, also after a crash or a loss of power."""

import os
from pathlib import Path

__all__ = ["sync_folder", "write_all"]


def sync_folder(folder: Path) -> None:
    """Makes what was created, renamed or removed in a folder last. Blocks: call it in a thread."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Writes all of `data` at `offset`, however many system calls that takes.

    Raises OSError, such as ENOSPC; what was written until then stays.
    """
    view = memoryview(data)
    while view.nbytes:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written
