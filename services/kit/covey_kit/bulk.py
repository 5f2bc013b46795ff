"""Bulk bytes between the network and files: hashing and file work in threads, overlapped with the network."""

import asyncio
import hashlib
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

from covey_kit.files import write_all
from covey_kit.limits import BULK_BYTES
from covey_kit.tasks import uninterrupted

__all__ = ["FileSink", "Hash", "digest_file", "file_blocks", "read_ahead", "read_blocks"]

_QUEUE_BYTES = 8 << 20
"""A sink takes this much before it makes its writer wait."""

_BATCH_BYTES = 2 << 20
"""What one turn of a reading thread reads: a hop between threads costs as much as hashing 64 KiB."""


class Hash(Protocol):
    """A running digest, as `hashlib` makes them."""

    def update(self, data: bytes, /) -> None:
        """Takes the next bytes."""
        ...

    def hexdigest(self) -> str:
        """Returns the digest of what was taken, in lower-case hex."""
        ...


def digest_file(path: Path) -> tuple[int, str]:
    """Returns a file's size in bytes and its SHA-256 in lower-case hex. Blocks: call it in a thread."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256")
        return file.tell(), sha256.hexdigest()


class FileSink:
    """An append-only file with a running SHA-256.

    `write` returns as soon as there is room in a bounded queue; two threads hash and write what is queued
    while the caller waits for its next bytes. One task at a time may use a sink.
    """

    def __init__(self, path: Path, descriptor: int, size: int, sha256: Hash) -> None:
        self._path = path
        self._descriptor: int | None = descriptor
        self._written = size
        self._size = size
        self._sha256 = sha256
        self._queue: list[bytes] = []
        self._queued = 0
        self._work: asyncio.Task[None] | None = None
        self._room = asyncio.Event()

    @classmethod
    async def open(cls, path: Path, *, resume: bool = False) -> "FileSink":
        """Opens a file for appending.

        Args:
            path: the file; made if it isn't there.
            resume: go on behind what is there (hashed again in a thread); else begin anew.

        Raises:
            OSError: it can't be opened or read.
        """
        opening = asyncio.ensure_future(asyncio.to_thread(_open, path, resume=resume))
        try:
            return cls(path, *await uninterrupted(opening))
        except asyncio.CancelledError:
            if not opening.cancelled() and opening.exception() is None:
                os.close(opening.result()[0])
            raise

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def size(self) -> int:
        """Bytes taken so far, those before a resume included."""
        return self._size

    async def write(self, data: bytes) -> None:
        """Takes the next bytes. Raises OSError (such as ENOSPC), perhaps one of an earlier write."""
        self._queue.append(data)
        self._queued += len(data)
        self._size += len(data)
        if self._work is None or self._work.done():
            self._raise_failure()
            self._work = asyncio.create_task(self._drain())
        while self._queued > _QUEUE_BYTES and not self._work.done():
            self._room.clear()
            await self._room.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._work is not None and self._work.done():
            self._work.result()

    async def _drain(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._queue:
                batch, self._queue = self._queue, []
                hashing = loop.run_in_executor(None, _hash, self._sha256, batch)
                writing = loop.run_in_executor(None, self._append, batch)
                # Both end before an error is told, so that nothing uses the file behind a closer's back.
                await asyncio.wait([hashing, writing])
                writing.result()
                self._queued -= sum(map(len, batch))
                self._room.set()
        finally:
            self._room.set()

    def _append(self, batch: Sequence[bytes]) -> None:
        assert self._descriptor is not None
        for block in batch:
            write_all(self._descriptor, block, self._written)
            self._written += len(block)

    async def _settle(self) -> None:
        if self._work is not None:
            await asyncio.shield(asyncio.wait([self._work]))

    async def finish(self, *, fsync: bool = True) -> tuple[int, str]:
        """Writes what is queued, closes the file and returns its size and SHA-256.

        Args:
            fsync: make the bytes survive a loss of power (the name lasts once its folder is synced).

        Raises:
            OSError: something couldn't be written; the file is closed and keeps what could.
        """
        try:
            await self._settle()
            self._raise_failure()
            if fsync and self._descriptor is not None:
                await uninterrupted(asyncio.to_thread(os.fsync, self._descriptor))
        finally:
            await self.close()
        return self._size, self._sha256.hexdigest()

    async def close(self) -> None:
        """Writes what is queued as far as it can be and closes the file, which stays. Idempotent."""
        await self._settle()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    async def abort(self) -> None:
        """Closes and removes the file. Idempotent."""
        await self.close()
        await asyncio.to_thread(self._path.unlink, missing_ok=True)


def _open(path: Path, *, resume: bool) -> tuple[int, int, Hash]:
    sha256 = hashlib.sha256()
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if resume else os.O_TRUNC)
    descriptor = os.open(path, flags, 0o600)
    size = 0
    try:
        while resume and (block := os.pread(descriptor, BULK_BYTES, size)):
            sha256.update(block)
            size += len(block)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, size, sha256


def _hash(sha256: Hash, blocks: Sequence[bytes]) -> None:
    for block in blocks:
        sha256.update(block)


def read_blocks(descriptor: int, offset: int, size: int, sha256: Hash | None = None) -> list[bytes]:
    """Reads up to `size` bytes in blocks of `BULK_BYTES` and hashes them. Fewer come only at the file's end.

    Blocks: call it in a thread.
    """
    blocks: list[bytes] = []
    end = offset + size
    while offset < end:
        block = os.pread(descriptor, min(BULK_BYTES, end - offset), offset)
        if not block:
            break
        if sha256 is not None:
            sha256.update(block)
        blocks.append(block)
        offset += len(block)
    return blocks


async def read_ahead(
    fetch: Callable[[int, int], Awaitable[Sequence[bytes]]], offset: int, size: int
) -> AsyncGenerator[bytes, None]:
    """Yields the blocks of a range, the next batch being fetched while the last one is used.

    Close it (`contextlib.aclosing`) before what `fetch` reads from is closed.

    Args:
        fetch: returns the blocks of (offset, size), fewer only at the end.
        offset: first byte.
        size: number of bytes.
    """
    end = offset + size

    def begin(start: int) -> "asyncio.Future[Sequence[bytes]]":
        return asyncio.ensure_future(fetch(start, min(_BATCH_BYTES, end - start)))

    pending = begin(offset) if offset < end else None
    try:
        while pending is not None:
            # Shielded, since a thread can't be stopped: what it reads from must stay open until it's done.
            blocks = await asyncio.shield(pending)
            offset += _BATCH_BYTES
            # One at a time, so that a hash in `fetch` sees the bytes in order.
            pending = begin(offset) if offset < end else None
            for block in blocks:
                yield block
    finally:
        if pending is not None:
            await asyncio.gather(pending, return_exceptions=True)


async def file_blocks(
    path: Path,
    offset: int = 0,
    size: int | None = None,
    *,
    sha256: Hash | None = None,
    executor: Executor | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yields a file's bytes from `offset` in blocks of `BULK_BYTES`, read ahead in threads.

    Args:
        path: the file.
        offset: first byte.
        size: number of bytes; None: all that follow.
        sha256: takes the bytes too, in order.
        executor: whose threads read; None: the loop's own.

    Raises:
        OSError: it can't be opened or read.
    """
    loop = asyncio.get_running_loop()
    descriptor = await loop.run_in_executor(executor, os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if size is None:
            size = max(os.fstat(descriptor).st_size - offset, 0)

        def fetch(start: int, length: int) -> Awaitable[Sequence[bytes]]:
            return loop.run_in_executor(executor, read_blocks, descriptor, start, length, sha256)

        blocks = read_ahead(fetch, offset, size)
        try:
            async for block in blocks:
                yield block
        finally:
            await blocks.aclose()
    finally:
        os.close(descriptor)
