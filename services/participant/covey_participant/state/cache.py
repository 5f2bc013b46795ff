"""Blobs on the device by their SHA-256: verified, bounded in bytes, the least recently used go first."""

import asyncio
import contextlib
import os
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from covey_kit.bulk import digest_file
from covey_kit.errors import CoveyError, DataLoss, Reason
from covey_participant.domain.ports import Fetch
from covey_participant.domain.values import Blob

log = structlog.get_logger(__name__)

DEFAULT_BYTES = 10 << 30

_DIGEST = re.compile("[0-9a-f]{64}")

_Mark = tuple[int, int, int]
"""(inode, size, modification time): unchanged since the content was verified, it needn't be hashed again."""


class BlobCache:
    """A folder of blobs, each under its digest.

    A blob is hashed when it is first used in a run of the program, and again whenever its file changed since;
    one that doesn't match its digest is removed and fetched anew. What is held is never evicted.

    Args:
        folder: made if it isn't there; its content from earlier runs is taken over.
        most_bytes: bound of all blobs together; what is held may go beyond it.
    """

    def __init__(self, folder: Path, most_bytes: int = DEFAULT_BYTES) -> None:
        self._folder = folder
        self._most = most_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._held: Counter[str] = Counter()
        self._verified: dict[str, _Mark] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def open(self) -> None:
        """Takes over what earlier runs left, oldest first."""
        found = await asyncio.to_thread(_scan, self._folder)
        self._sizes = OrderedDict(found)
        await self._shrink(self._most)

    @property
    def bytes(self) -> int:
        """Bytes of all blobs."""
        return sum(self._sizes.values())

    def path(self, sha256: str) -> Path:
        """Returns where a blob lies when it is there."""
        return self._folder / sha256

    @asynccontextmanager
    async def hold(self, blob: Blob, fetch: Fetch) -> AsyncIterator[Path]:
        """Holds a blob, fetching it if it isn't there whole. Two callers fetch it once.

        Raises:
            CoveyError: what `fetch` raises; `DataLoss` (`DIGEST_MISMATCH`) when it brought something else.
        """
        if not _DIGEST.fullmatch(blob.sha256):  # it becomes a file's name
            raise DataLoss(Reason.DIGEST_MISMATCH, f"{blob.sha256[:80]!r} isn't a SHA-256")
        self._held[blob.sha256] += 1
        try:
            async with self._locks.setdefault(blob.sha256, asyncio.Lock()):
                path = await self._ensure(blob, fetch)
            yield path
        finally:
            self._held[blob.sha256] -= 1
            if not self._held[blob.sha256]:
                del self._held[blob.sha256]
                self._locks.pop(blob.sha256, None)
            await self._shrink(self._most)

    async def _ensure(self, blob: Blob, fetch: Fetch) -> Path:
        path = self.path(blob.sha256)
        if not await self._whole(blob, path):
            await self._fetch(blob, path, fetch)
            if not await self._whole(blob, path):
                raise DataLoss(
                    Reason.DIGEST_MISMATCH, f"blob {blob.sha256} came with another content or size"
                )
        self._sizes[blob.sha256] = blob.size
        self._sizes.move_to_end(blob.sha256)
        self._verified[blob.sha256] = await asyncio.to_thread(_touch, path)
        return path

    async def _fetch(self, blob: Blob, path: Path, fetch: Fetch) -> None:
        await self._shrink(self._most - blob.size)
        try:
            await fetch(path)
        except CoveyError as error:
            if error.reason is not Reason.STORAGE_FULL:
                raise
            # The disk is smaller than the bound: give up everything that isn't held, and try once more.
            log.warning("the disk is full; emptying the cache", bytes=self.bytes)
            await self._shrink(0)
            await fetch(path)

    async def _whole(self, blob: Blob, path: Path) -> bool:
        mark = await asyncio.to_thread(_mark, path)
        if mark is None:
            return False
        if mark == self._verified.get(blob.sha256):
            return True
        if await asyncio.to_thread(digest_file, path) == (blob.size, blob.sha256):
            return True
        log.warning("a cached blob is damaged; fetching it again", sha256=blob.sha256)
        await self._remove(blob.sha256)
        return False

    async def _shrink(self, most: int) -> None:
        total = self.bytes
        for sha256 in [name for name in self._sizes if not self._held[name]]:
            if total <= most:
                return
            total -= self._sizes[sha256]
            await self._remove(sha256)

    async def _remove(self, sha256: str) -> None:
        self._sizes.pop(sha256, None)
        self._verified.pop(sha256, None)
        with contextlib.suppress(OSError):
            await asyncio.to_thread(self.path(sha256).unlink)


def _scan(folder: Path) -> list[tuple[str, int]]:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = []
    for entry in os.scandir(folder):
        if entry.is_file(follow_symlinks=False) and len(entry.name) == 64:
            stat = entry.stat(follow_symlinks=False)
            found.append((stat.st_mtime_ns, entry.name, stat.st_size))
    return [(name, size) for _, name, size in sorted(found)]


def _mark(path: Path) -> _Mark | None:
    try:
        stat = path.lstat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _touch(path: Path) -> _Mark:
    """Marks a blob as used now; the order of use is that of the modification times."""
    now = time.time_ns()  # the kernel's own "now" is milliseconds coarse
    os.utime(path, ns=(now, now))
    mark = _mark(path)
    assert mark is not None
    return mark
