"""How a blob arrives: in parts that survive a cut, visible only when its hash is right."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from covey_kit.clock import Clock
from covey_kit.errors import Aborted, FailedPrecondition, InvalidArgument, Reason, ResourceExhausted
from covey_storage.domain.locks import KeyedLocks
from covey_storage.domain.model import BlobRef
from covey_storage.domain.ports import BlobRecords, Objects, Part, Parts

__all__ = ["Limits", "Write", "Writes", "check_room"]


@dataclass(frozen=True)
class Limits:
    """Bounds on writes.

    Attributes:
        max_blob_bytes: largest blob.
        min_free_bytes: room that writes leave on the disk.
    """

    max_blob_bytes: int
    min_free_bytes: int


def check_room(ref: BlobRef, offset: int, free_bytes: int, limits: Limits) -> None:
    """Raises ResourceExhausted when a blob is too large or what is missing of it has no room."""
    if ref.size > limits.max_blob_bytes:
        raise ResourceExhausted(
            Reason.LIMIT_EXCEEDED,
            f"the blob has {ref.size} bytes; storage takes at most {limits.max_blob_bytes}",
            metadata={"limit": str(limits.max_blob_bytes)},
        )
    room = max(free_bytes - limits.min_free_bytes, 0)
    if ref.size - offset > room:
        raise ResourceExhausted(
            Reason.STORAGE_FULL,
            f"{ref.size - offset} bytes are to come, storage has room for {room}: delete what nobody needs",
        )


class Write:
    """One stream that writes a blob."""

    def __init__(self, writes: "Writes", ref: BlobRef, part: Part) -> None:
        self._writes = writes
        self._ref = ref
        self._part = part

    async def take(self, data: bytes) -> None:
        """Takes the next bytes. Raises InvalidArgument (SIZE_MISMATCH) when they're more than announced."""
        if self._part.size + len(data) > self._ref.size:
            found = self._part.size + len(data)
            await self._part.abort()
            raise self._wrong_size(f"at least {found} bytes came; the partial write was dropped")
        await self._part.write(data)

    async def finish(self) -> None:
        """Makes the blob visible; when this returns it survives a loss of power.

        Raises:
            InvalidArgument: SIZE_MISMATCH, fewer bytes came than announced: they're kept, a write can go
                on; DIGEST_MISMATCH, they hash to something else: they're dropped.
        """
        if self._part.size < self._ref.size:
            raise self._wrong_size(f"the stream ended behind byte {self._part.size}: go on from there")
        size, digest = await self._part.finish()
        if digest != self._ref.sha256:
            await self._part.abort()
            raise InvalidArgument(
                Reason.DIGEST_MISMATCH,
                f"the {size} bytes that came hash to {digest}; {self._ref.sha256} was announced; "
                "the partial write was dropped",
                metadata={"expected": self._ref.sha256, "found": digest},
            )
        await self._writes.publish(self._ref, self._part)

    def _wrong_size(self, what: str) -> InvalidArgument:
        return InvalidArgument(
            Reason.SIZE_MISMATCH,
            f"{self._ref.size} bytes were announced for blob {self._ref.sha256}; {what}",
            metadata={"expected": str(self._ref.size), "found": str(self._part.size)},
        )


class Writes:
    """Writes in progress: at most one for each blob."""

    def __init__(
        self,
        records: BlobRecords,
        objects: Objects,
        parts: Parts,
        locks: KeyedLocks,
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._records = records
        self._objects = objects
        self._parts = parts
        self._locks = locks
        self._clock = clock
        self._limits = limits
        self._active: set[str] = set()

    def is_active(self, sha256: str) -> bool:
        """Says whether a stream writes this blob right now."""
        return sha256 in self._active

    async def committed(self, sha256: str) -> tuple[int, bool]:
        """Returns (bytes that are there, whether the blob is whole and verified)."""
        sizes = await self._records.sizes([sha256])
        if sha256 in sizes:
            return sizes[sha256], True
        return await self._parts.size(sha256), False

    @asynccontextmanager
    async def open(self, ref: BlobRef, offset: int) -> AsyncIterator[Write | None]:
        """Begins a write, or goes on with one at `offset`. Gives None when the blob is already there.

        What has arrived is kept when the block ends before `finish`.

        Raises:
            Aborted: another stream writes this blob.
            FailedPrecondition: OFFSET_MISMATCH, the part that's there doesn't end at `offset`.
            ResourceExhausted: LIMIT_EXCEEDED or STORAGE_FULL.
        """
        if ref.sha256 in await self._records.sizes([ref.sha256]):
            yield None
            return
        if ref.sha256 in self._active:
            raise Aborted(
                Reason.OFFSET_MISMATCH,
                f"another stream writes blob {ref.sha256} right now; try again later",
                retry_after=1.0,
            )
        self._active.add(ref.sha256)
        try:
            part = await self._open_part(ref, offset)
            try:
                yield Write(self, ref, part)
            finally:
                await part.close()
        finally:
            self._active.discard(ref.sha256)

    async def _open_part(self, ref: BlobRef, offset: int) -> Part:
        there = await self._parts.size(ref.sha256)
        if offset not in {0, there}:
            raise FailedPrecondition(
                Reason.OFFSET_MISMATCH,
                f"{there} bytes of blob {ref.sha256} are there, so a write can't go on at {offset}; "
                "ask QueryWrite and go on from there",
                metadata={"committed_bytes": str(there)},
            )
        check_room(ref, offset, await self._parts.free_bytes(), self._limits)
        return await self._parts.open(ref.sha256, resume=offset > 0)

    async def publish(self, ref: BlobRef, part: Part) -> None:
        """Makes a verified part visible: first the file, then its record.

        A crash in between leaves a file without a record, which the next start hashes and records.
        """

        async def both() -> None:
            await self._objects.publish(ref.sha256, part.path)
            await self._records.put(ref, self._clock.now())

        await self._locks.run(ref.sha256, both)
