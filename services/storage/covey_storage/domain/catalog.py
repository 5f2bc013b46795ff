"""What is there, who needs it, and what may go."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from covey_kit.clock import Clock
from covey_kit.errors import FailedPrecondition, Reason
from covey_storage.domain.errors import blob_missing
from covey_storage.domain.locks import KeyedLocks
from covey_storage.domain.model import DIGEST, BlobRecord, BlobRef, Released, Totals
from covey_storage.domain.pages import PageTokens
from covey_storage.domain.ports import BlobRecords, Objects, Parts, References

__all__ = ["Catalog", "Inventory"]

_ASKED_AT_ONCE = 1000
_REMOVED_AT_ONCE = 500
_DEFAULT_PAGE = 1000
_LISTING = "inventory"


@dataclass(frozen=True)
class Inventory:
    """What is stored: sums, and one page of blobs by digest."""

    totals: Totals
    partial_count: int
    blobs: Sequence[BlobRecord]
    next_page_token: str


class Catalog:
    """Blobs as records: lookups, references, deletion."""

    def __init__(
        self,
        records: BlobRecords,
        references: References,
        objects: Objects,
        parts: Parts,
        locks: KeyedLocks,
        clock: Clock,
        tokens: PageTokens,
    ) -> None:
        self._records = records
        self._references = references
        self._objects = objects
        self._parts = parts
        self._locks = locks
        self._clock = clock
        self._tokens = tokens

    async def find_missing(self, refs: Sequence[BlobRef]) -> list[BlobRef]:
        """Returns those that aren't visible, or are with another size, in the order asked."""
        missing: list[BlobRef] = []
        for start in range(0, len(refs), _ASKED_AT_ONCE):
            asked = refs[start : start + _ASKED_AT_ONCE]
            sizes = await self._records.sizes([ref.sha256 for ref in asked])
            missing += [ref for ref in asked if sizes.get(ref.sha256) != ref.size]
        return missing

    async def delete(self, sha256: str) -> bool:
        """Deletes a blob that nobody holds; False when there was none. Raises FailedPrecondition."""
        return await self._locks.run(sha256, lambda: self._delete(sha256))

    async def _delete(self, sha256: str) -> bool:
        gone, holders = await self._records.remove(sha256)
        if holders:
            raise FailedPrecondition(
                Reason.BLOB_REFERENCED,
                f"blob {sha256} is referenced by {', '.join(holders[:20])}"
                + (f" and {len(holders) - 20} more" if len(holders) > 20 else "")
                + "; release these holders first",
                metadata={"holders": ",".join(holders[:100])},
                resource=("blob", sha256),
            )
        if gone:
            await self._objects.delete(sha256)
            await self._records.removed([sha256])
        return gone

    async def add_references(self, holder: str, digests: Sequence[str]) -> None:
        """References all of them, or raises FailedPrecondition (BLOB_MISSING) and references none."""
        missing = await self._references.add(holder, digests)
        if missing:
            raise blob_missing(missing)

    async def release(self, holder: str, *, delete: bool) -> Released:
        """Drops what a holder references; with `delete`, also the blobs that nobody holds any more."""
        released = await self._references.release(holder, delete=delete)
        await self._remove_files([ref.sha256 for ref in released.freed])
        return released

    async def finish_removals(self) -> int:
        """Removes the files that a crash left behind their records; returns how many. For the start."""
        removed = 0
        while digests := await self._records.removals(_REMOVED_AT_ONCE):
            await self._remove_files(digests)
            removed += len(digests)
        return removed

    async def _remove_files(self, digests: Sequence[str]) -> None:
        for start in range(0, len(digests), _REMOVED_AT_ONCE):
            some = digests[start : start + _REMOVED_AT_ONCE]
            for sha256 in some:
                await self._locks.run(sha256, partial(self._remove_unrecorded, sha256))
            await self._records.removed(some)

    async def _remove_unrecorded(self, sha256: str) -> None:
        # It may have been written again since its record went.
        if not await self._records.known([sha256]):
            await self._objects.delete(sha256)

    async def inventory(self, page_size: int, page_token: str) -> Inventory:
        """Returns the sums and a page of blobs. Raises InvalidArgument (PAGE_TOKEN)."""
        after = self._tokens.read(_LISTING, page_token) if page_token else ""
        size = page_size or _DEFAULT_PAGE
        blobs: list[BlobRecord] = []
        # In parts, so that other calls get their turn; one more, to see whether there is a next page.
        while len(blobs) <= size:
            part = await self._records.page(after, min(_ASKED_AT_ONCE, size + 1 - len(blobs)))
            if not part:
                break
            blobs += part
            after = part[-1].ref.sha256
        more = len(blobs) > size
        blobs = blobs[:size]
        token = self._tokens.issue(_LISTING, blobs[-1].ref.sha256) if more else ""
        parts = [name for name in await self._parts.ages(self._clock.now()) if DIGEST.fullmatch(name)]
        return Inventory(await self._records.totals(), len(parts), blobs, token)
