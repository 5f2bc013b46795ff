"""Parts of blobs that haven't arrived whole: plain files, so that a write can go on at any byte."""

import asyncio
import os
from pathlib import Path

from covey_kit.bulk import FileSink
from covey_storage.domain.model import DIGEST
from covey_storage.state.errors import world_errors

__all__ = ["FilePart", "FileParts"]


class FilePart:
    """`Part` as a file."""

    def __init__(self, sink: FileSink) -> None:
        self._sink = sink

    @property
    def path(self) -> Path:
        """The file."""
        return self._sink.path

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._sink.size

    async def write(self, data: bytes) -> None:
        """Takes the next bytes."""
        with world_errors():
            await self._sink.write(data)

    async def finish(self) -> tuple[int, str]:
        """Makes it last; returns its size and SHA-256."""
        with world_errors():
            return await self._sink.finish()

    async def close(self) -> None:
        """Closes it; what has arrived is kept. Idempotent."""
        await self._sink.close()

    async def abort(self) -> None:
        """Closes and removes it. Idempotent."""
        with world_errors():
            await self._sink.abort()


class FileParts:
    """`Parts` in a folder; a part's file has its blob's digest as its name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, sha256: str) -> Path:
        if not DIGEST.fullmatch(sha256):
            raise ValueError(f"{sha256!r} isn't a digest")
        return self._folder / sha256

    async def size(self, sha256: str) -> int:
        """Returns how much of a blob has arrived."""
        with world_errors():
            return await asyncio.to_thread(_size, self._path(sha256))

    async def open(self, sha256: str, *, resume: bool) -> FilePart:
        """Opens the part of a blob, to go on or to begin anew."""
        with world_errors():
            return FilePart(await FileSink.open(self._path(sha256), resume=resume))

    async def free_bytes(self) -> int:
        """Returns how much room the disk has for us."""

        def free() -> int:
            found = os.statvfs(self._folder)
            return found.f_bavail * found.f_frsize

        with world_errors():
            return await asyncio.to_thread(free)

    async def ages(self, now: float) -> dict[str, float]:
        """Returns for each part (by file name) how many seconds ago it grew."""

        def ages() -> dict[str, float]:
            with os.scandir(self._folder) as entries:
                return {entry.name: now - entry.stat().st_mtime for entry in entries if entry.is_file()}

        with world_errors():
            return await asyncio.to_thread(ages)

    async def remove(self, name: str) -> None:
        """Removes a part by its file name."""
        if Path(name).name != name:
            raise ValueError(f"{name!r} isn't a file's name")
        with world_errors():
            await asyncio.to_thread((self._folder / name).unlink, missing_ok=True)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
