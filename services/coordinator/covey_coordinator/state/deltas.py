"""Deltas on the coordinator's disk, from their arrival until the round's checkpoint is stored.

A delta is a flat array of little-endian f32 in manifest order. It is hashed and checked for finite
values while it streams in, and it is in its place only when all of it is verified and would survive a
loss of power. A round's deltas lie in a folder of their own as `<key>.<sha256>.f32`.
"""

import asyncio
import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import numpy as np

from covey_coordinator.state.disk import room_for
from covey_kit.checkpoints import first_not_finite
from covey_kit.errors import Aborted, DataLoss, InvalidArgument, Reason
from covey_kit.files import sync_folder, write_all

__all__ = [
    "DeltaSink",
    "StoredDelta",
    "delta_path",
    "list_round",
    "recover_round",
    "remove_round",
    "verify_delta",
]

_F32: Final = np.dtype("<f4")
_KEY: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,150}")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_FILE: Final = re.compile(rf"({_KEY.pattern})\.({_SHA256.pattern})\.f32")
_REMOVED: Final = ".removed"


@dataclass(frozen=True)
class StoredDelta:
    """A delta that was verified and is on disk.

    Attributes:
        path: the file: flat little-endian f32 and nothing else.
        sha256: digest of the file, 64 hex digits.
        size: bytes of the file, 4 for each weight.
    """

    path: Path
    sha256: str
    size: int


def delta_path(folder: Path, key: str, sha256: str) -> Path:
    """Returns where the delta of that key and digest lies once it's stored."""
    if not _KEY.fullmatch(key) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"expected a key of [a-z0-9_-] and 64 hex digits, found {key!r} and {sha256!r}")
    return folder / f"{key}.{sha256}.f32"


class DeltaSink:
    """Takes one delta as it arrives. Use it with `async with`: what isn't finished is removed.

    Hashing, checking and writing go on in a thread while the next message is on its way, so an error
    may show one call later. At most two messages are in memory.
    """

    def __init__(self, path: Path, temporary: Path, descriptor: int, size: int, sha256: str) -> None:
        """Takes over an open file; made by `open`."""
        self._path = path
        self._temporary = temporary
        self._descriptor = descriptor
        self._size = size
        self._sha256 = sha256
        self._announced = 0  # bytes that `write` was given
        self._pending: asyncio.Future[None] | None = None
        # The thread's side, all of it under the lock.
        self._lock = threading.Lock()
        self._open = True
        self._hash = hashlib.sha256()
        self._finite = _FiniteCheck()
        self._written = 0

    @classmethod
    async def open(cls, folder: Path, key: str, weight_count: int, size: int, sha256: str) -> Self:
        """Prepares for a delta of `size` bytes that hashes to `sha256`.

        Args:
            folder: the round's folder; made if it isn't there.
            key: names the result, such as its assignment and attempt: [a-z0-9_-], up to 151 characters.
            weight_count: elements that the delta must have.
            size: bytes announced.
            sha256: digest announced, 64 hex digits.

        Raises:
            InvalidArgument: SIZE_MISMATCH, the announced size isn't 4 × the weight count.
            ResourceExhausted: STORAGE_FULL.
            ValueError: key or digest is no such thing.
        """
        if size != weight_count * _F32.itemsize:
            raise InvalidArgument(
                Reason.SIZE_MISMATCH,
                f"expected a delta of {weight_count * _F32.itemsize} bytes "
                f"(4 for each of {weight_count} weights), {size} are announced",
            )
        path = delta_path(folder, key, sha256)
        # Two streams may bring the same result at once, when a device gave up on the first too early.
        temporary = folder / f".{key}.{secrets.token_hex(8)}.part"
        with _storage_errors():
            descriptor = await asyncio.to_thread(_create, temporary)
        return cls(path, temporary, descriptor, size, sha256)

    async def write(self, data: bytes) -> None:
        """Takes the next bytes, however they are cut.

        Raises:
            InvalidArgument: SIZE_MISMATCH, more bytes than announced; refused as soon as they come.
            ResourceExhausted: STORAGE_FULL.
        """
        self._announced += len(data)
        if self._announced > self._size:
            raise InvalidArgument(
                Reason.SIZE_MISMATCH,
                f"expected {self._size} bytes as announced, but {self._announced} or more came",
            )
        await self._settle()
        self._pending = asyncio.get_running_loop().run_in_executor(None, self._take, data)
        # When the call ends before anybody waits for it, its error is nobody's business.
        self._pending.add_done_callback(lambda done: done.cancelled() or done.exception())

    async def finish(self) -> StoredDelta:
        """Verifies the whole and puts it into its place. When it returns, the delta survives a loss of power.

        Raises:
            InvalidArgument: SIZE_MISMATCH (too few bytes), DIGEST_MISMATCH or DELTA_NOT_FINITE.
            ResourceExhausted: STORAGE_FULL.
            Aborted: ASSIGNMENT_LOST, the round was removed while the delta arrived.
        """
        await self._settle()
        self._check()
        with _storage_errors():
            await asyncio.to_thread(self._keep)
        return StoredDelta(self._path, self._sha256, self._size)

    async def abort(self) -> None:
        """Removes what came so far. Does nothing after `finish` succeeded, or when called again."""
        await asyncio.to_thread(self._discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.abort()

    async def _settle(self) -> None:
        """Waits until the thread is through with the message before, and raises what it met."""
        if self._pending is not None:
            with _storage_errors():
                await asyncio.shield(self._pending)
            self._pending = None

    def _check(self) -> None:
        if self._written != self._size:
            raise InvalidArgument(
                Reason.SIZE_MISMATCH, f"expected {self._size} bytes as announced, but {self._written} came"
            )
        found = self._hash.hexdigest()
        if found != self._sha256:
            raise InvalidArgument(
                Reason.DIGEST_MISMATCH,
                f"expected SHA-256 {self._sha256} as announced, but what came has {found}; send it again",
            )
        first, count = self._finite.first, self._finite.count
        if first is not None:
            raise InvalidArgument(
                Reason.DELTA_NOT_FINITE,
                f"{count} of the delta's {self._size // 4} values are NaN or infinite, the first is "
                f"element {first}, counted from 0; a smaller learning rate often helps",
                metadata={"first": str(first), "count": str(count)},
            )

    def _take(self, data: bytes) -> None:
        with self._lock:
            if not self._open:
                return
            write_all(self._descriptor, data, self._written)
            self._hash.update(data)
            self._finite.update(data)
            self._written += len(data)

    def _keep(self) -> None:
        with self._lock:
            if not self._open:
                raise ValueError("the delta was aborted or finished before")
            os.fsync(self._descriptor)
            self._close()
            self._temporary.replace(self._path)
            sync_folder(self._path.parent)

    def _discard(self) -> None:
        with self._lock:
            if self._open:
                self._close()
                self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        self._open = False
        os.close(self._descriptor)


class _FiniteCheck:
    """Counts values that aren't finite in a stream of f32 that may be cut inside of a value."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.count = 0
        self._elements = 0
        self._rest = b""

    def update(self, data: bytes) -> None:
        view = memoryview(data)
        if self._rest:
            head = self._rest + bytes(view[: _F32.itemsize - len(self._rest)])
            view = view[_F32.itemsize - len(self._rest) :]
            if len(head) < _F32.itemsize:
                self._rest = head
                return
            self._look(np.frombuffer(head, dtype=_F32))
        whole = view.nbytes // _F32.itemsize
        self._rest = bytes(view[whole * _F32.itemsize :])
        if whole:
            self._look(np.frombuffer(view, dtype=_F32, count=whole))

    def _look(self, values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
        place = first_not_finite(values)
        if place is not None:
            if self.first is None:
                self.first = self._elements + place
            self.count += int(np.count_nonzero(~np.isfinite(values)))
        self._elements += values.size


async def verify_delta(delta: StoredDelta) -> None:
    """Reads a stored delta again and compares it with its digest.

    Raises:
        DataLoss: DIGEST_MISMATCH, the file is gone or its bytes changed. Its assignment has to be done again.
    """
    await asyncio.to_thread(_verify, delta)


async def list_round(folder: Path) -> list[StoredDelta]:
    """Returns the deltas that lie in a round's folder, by file name. No folder: none."""
    return await asyncio.to_thread(lambda: list(_stored(folder)))


async def recover_round(folder: Path, accepted: Collection[StoredDelta]) -> list[StoredDelta]:
    """Tidies a round's folder after a restart: verifies what was accepted and removes all else.

    What else there can be: the beginnings of deltas, and whole ones whose acceptance wasn't recorded any
    more; their participants send them again.

    Returns those of `accepted` that are gone or damaged (their files are removed too), in their order:
    their assignments have to be done again.
    """
    return await asyncio.to_thread(_recover, folder, accepted)


async def remove_round(folder: Path) -> None:
    """Removes a round's folder with everything in it. Nothing there: nothing happens."""
    await asyncio.to_thread(_remove, folder)


@contextmanager
def _storage_errors() -> Iterator[None]:
    """Turns a full disk into STORAGE_FULL, and a folder that is no longer there into ASSIGNMENT_LOST."""
    try:
        with room_for("the delta"):
            yield
    except FileNotFoundError:
        message = "the round of this delta ended while it arrived; drop it"
        raise Aborted(Reason.ASSIGNMENT_LOST, message) from None


def _create(path: Path) -> int:
    missing = []
    folder = path.parent
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _verify(delta: StoredDelta) -> None:
    try:
        with delta.path.open("rb", buffering=0) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        found = ""
    if found != delta.sha256:
        state = f"hashes to {found}" if found else "is gone"
        raise DataLoss(
            Reason.DIGEST_MISMATCH,
            f"the stored delta {delta.sha256} {state}; its assignment has to be done again",
        )


def _stored(folder: Path) -> Iterator[StoredDelta]:
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if match := _FILE.fullmatch(path.name):
            yield StoredDelta(path, match[2], path.stat().st_size)


def _recover(folder: Path, accepted: Collection[StoredDelta]) -> list[StoredDelta]:
    damaged = []
    for delta in accepted:
        try:
            _verify(delta)
        except DataLoss:
            damaged.append(delta)
    if folder.is_dir():
        keep = {delta.path.name for delta in accepted} - {delta.path.name for delta in damaged}
        for path in folder.iterdir():
            if path.name not in keep:
                path.unlink()
        sync_folder(folder)
    return damaged


def _remove(folder: Path) -> None:
    # Renamed first, so that a delta that is just being finished meets no half-removed folder.
    doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{_REMOVED}")
    try:
        folder.rename(doomed)
    except FileNotFoundError:
        return
    shutil.rmtree(doomed)
    # What an earlier removal left when the process was killed in the middle of it.
    for leftover in folder.parent.glob(f".*{_REMOVED}"):
        shutil.rmtree(leftover, ignore_errors=True)
    sync_folder(folder.parent)
