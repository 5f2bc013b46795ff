"""Hashes everything again, and clears away what nobody owns. Also what a start mends after a crash."""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial

from covey_kit.clock import Clock
from covey_storage.domain.gate import Gate
from covey_storage.domain.keeper import Keeper
from covey_storage.domain.locks import KeyedLocks
from covey_storage.domain.model import DIGEST, BlobRef
from covey_storage.domain.ports import BlobRecords, Objects, Parts
from covey_storage.domain.writes import Writes

__all__ = ["Mended", "Progress", "Scrubber"]

_PAGE = 500
_REPORT_SECONDS = 1.0


@dataclass(frozen=True)
class Progress:
    """How far a scrub is. `damaged` are those since the last report."""

    blobs_checked: int = 0
    bytes_checked: int = 0
    blobs_total: int = 0
    damaged: tuple[str, ...] = ()
    orphans_removed: int = 0
    done: bool = False


@dataclass
class Mended:
    """What a start found and put right.

    Attributes:
        adopted: files without a (good) record whose bytes are right: recorded now.
        dropped: files without a record whose bytes are wrong: removed.
        lost: records whose file isn't there: quarantined now.
        set_aside: damaged files that a crash left in their place.
    """

    adopted: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)


class Scrubber:
    """Compares records with files."""

    def __init__(
        self,
        records: BlobRecords,
        objects: Objects,
        parts: Parts,
        writes: Writes,
        keeper: Keeper,
        locks: KeyedLocks,
        clock: Clock,
        gate: Gate,
        *,
        stale_part_seconds: float,
    ) -> None:
        self._records = records
        self._objects = objects
        self._parts = parts
        self._writes = writes
        self._keeper = keeper
        self._locks = locks
        self._clock = clock
        self._gate = gate
        self._stale = stale_part_seconds

    async def scrub(self) -> AsyncGenerator[Progress, None]:
        """Hashes every visible blob, then removes orphans and stale parts. Reports at least once a second."""
        totals = await self._records.totals()
        now = Progress(blobs_total=totals.blob_count)
        reported = self._clock.monotonic()
        async with aclosing(self._hash_all(now)) as steps:
            async for now in steps:
                self._gate.check()
                if now.damaged or self._clock.monotonic() - reported >= _REPORT_SECONDS:
                    yield now
                    reported = self._clock.monotonic()
        now = replace(now, damaged=())
        removed = 0
        async for _ in self._orphans():
            removed += 1
            if self._clock.monotonic() - reported >= _REPORT_SECONDS:
                yield replace(now, orphans_removed=removed)
                reported = self._clock.monotonic()
        removed += await self._drop_stale_parts()
        yield replace(now, orphans_removed=removed, done=True)

    async def _hash_all(self, now: Progress) -> AsyncGenerator[Progress, None]:
        """Yields the state behind each block and each blob, `damaged` only behind the blob it's about."""
        after = ""
        while page := await self._records.page(after, _PAGE):
            for record in page:
                after = record.ref.sha256
                if record.quarantined:
                    continue
                digest = hashlib.sha256()
                before = now.bytes_checked
                async with aclosing(self._objects.read(after, 0, record.ref.size, digest)) as blocks:
                    async for block in blocks:
                        now = replace(now, bytes_checked=now.bytes_checked + len(block), damaged=())
                        yield now
                damaged: tuple[str, ...] = ()
                if now.bytes_checked - before != record.ref.size or digest.hexdigest() != after:
                    condition = await self._keeper.inspect(after)
                    damaged = (after,) if condition.is_bad else ()
                now = replace(now, blobs_checked=now.blobs_checked + 1, damaged=damaged)
                yield now

    async def _orphans(self) -> AsyncIterator[str]:
        """Removes objects without a record and files that aren't objects; yields each."""
        async for names in self._objects.names():
            known = await self._records.known([name for name in names if DIGEST.fullmatch(name)])
            for name in names:
                if not DIGEST.fullmatch(name):
                    await self._objects.remove_stray(name)
                    yield name
                elif name not in known and await self._locks.run(name, partial(self._drop_orphan, name)):
                    yield name

    async def _drop_orphan(self, sha256: str) -> bool:
        if await self._records.known([sha256]):
            return False  # it became visible meanwhile
        await self._objects.delete(sha256)
        return True

    async def _drop_stale_parts(self) -> int:
        dropped = 0
        for name, age in (await self._parts.ages(self._clock.now())).items():
            if age >= self._stale and not self._writes.is_active(name):
                await self._parts.remove(name)
                dropped += 1
        return dropped

    async def mend(self) -> Mended:
        """Brings records and files together after a crash. For the start, before anyone calls."""
        mended = Mended()
        found: set[str] = set()
        async for names in self._objects.names():
            digests = [name for name in names if DIGEST.fullmatch(name)]
            found.update(digests)
            known = await self._records.known(digests)
            for sha256 in digests:
                if sha256 not in known:
                    await self._adopt(sha256, mended)
        after = ""
        while page := await self._records.page(after, _PAGE):
            for record in page:
                after = record.ref.sha256
                if record.quarantined and after in found:
                    await self._adopt(after, mended)
                elif not record.quarantined and after not in found:
                    await self._records.quarantine(after)
                    mended.lost.append(after)
        return mended

    async def _adopt(self, sha256: str, mended: Mended) -> None:
        size = await self._objects.size(sha256)
        if size is None:
            return
        if await self._keeper.digest(sha256, size) == sha256:
            await self._records.put(BlobRef(sha256, size), self._clock.now())
            mended.adopted.append(sha256)
        elif await self._records.known([sha256]):
            await self._objects.set_aside(sha256)
            mended.set_aside.append(sha256)
        else:
            await self._objects.delete(sha256)
            mended.dropped.append(sha256)
