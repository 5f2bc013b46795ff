"""How a blob leaves: to those who may have it, hashed on the way."""

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing

from covey_kit.caller import Caller, Role
from covey_kit.errors import OutOfRange, PermissionDenied, Reason, Unavailable
from covey_storage.domain.errors import blob_corrupt, blob_not_found
from covey_storage.domain.keeper import Condition, Keeper
from covey_storage.domain.model import BlobRecord, JobHolder
from covey_storage.domain.ports import BlobRecords, CheckpointRecords, Objects, References

__all__ = ["Reading", "Reads", "range_of"]


def range_of(size: int, offset: int, limit: int) -> tuple[int, int]:
    """Returns (first byte, number of bytes) of what a read asks for; a limit of 0 is all that follow.

    Raises OutOfRange (RANGE) when `offset` lies behind the end. At the end, nothing follows: that's no error.
    """
    if offset > size:
        raise OutOfRange(
            Reason.RANGE,
            f"byte {offset} was asked for; the blob has {size} bytes",
            metadata={"size_bytes": str(size)},
        )
    left = size - offset
    return offset, min(limit, left) if limit else left


class Reading:
    """One read: `blocks` to the end, then `range_sha256`.

    Attributes:
        blob_size: bytes of the whole blob.
        offset: first byte sent.
        size: bytes that follow.
    """

    def __init__(self, reads: "Reads", record: BlobRecord, offset: int, size: int) -> None:
        self._reads = reads
        self._sha256 = record.ref.sha256
        self._digest = hashlib.sha256()
        self.blob_size = record.ref.size
        self.offset = offset
        self.size = size

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """Yields the bytes.

        Raises DataLoss at the end when a whole blob doesn't hash to its key, or a checkpoint's weights to
        their digest: the receiver throws away what it got, and the blob is quarantined.
        """
        done = 0
        source = self._reads.objects.read(self._sha256, self.offset, self.size, self._digest)
        async with aclosing(source) as blocks:
            async for block in blocks:
                yield block
                done += len(block)
        await self._reads.check(self._sha256, self, complete=done == self.size)

    @property
    def is_whole(self) -> bool:
        """Whether the range is the whole blob."""
        return self.size == self.blob_size

    @property
    def range_sha256(self) -> str:
        """SHA-256 of what `blocks` yielded."""
        return self._digest.hexdigest()


class Reads:
    """Reads and descriptions of blobs."""

    def __init__(
        self,
        records: BlobRecords,
        references: References,
        checkpoints: CheckpointRecords,
        objects: Objects,
        keeper: Keeper,
    ) -> None:
        self._records = records
        self._references = references
        self._checkpoints = checkpoints
        self._keeper = keeper
        self.objects = objects

    async def _admit(self, caller: Caller, sha256: str) -> None:
        """Raises PermissionDenied (NO_GRANT) alike for blobs of other jobs and blobs that don't exist."""
        if caller.role in {Role.OWNER, Role.SERVICE}:
            return
        if caller.role is Role.GRANT and caller.job_id is not None:
            if await self._references.holds(JobHolder.of(caller.job_id), sha256):
                return
            what = f"the grant for job {caller.job_id} doesn't cover blob {sha256}"
        else:
            what = f"a {caller.role.value} may not read blobs"
        raise PermissionDenied(Reason.NO_GRANT, f"{what}; accept the job's invitation and use its grant")

    async def stat(self, caller: Caller, sha256: str) -> BlobRecord:
        """Describes a blob. A grant sees its own job among the holders, not the others."""
        await self._admit(caller, sha256)
        record = await self._records.get(sha256)
        if record is None:
            raise blob_not_found(sha256)
        if caller.role is not Role.GRANT or caller.job_id is None:
            return record
        own = JobHolder.of(caller.job_id)
        holders = tuple(holder for holder in record.holders if holder == own)
        return BlobRecord(record.ref, record.create_time, record.quarantined, holders)

    async def open(self, caller: Caller, sha256: str, offset: int, limit: int) -> Reading:
        """Begins a read. Raises PermissionDenied, NotFound, OutOfRange or DataLoss."""
        record = await self.stat(caller, sha256)
        if record.quarantined:
            raise blob_corrupt(sha256, "was found damaged")
        offset, size = range_of(record.ref.size, offset, limit)
        if await self.objects.size(sha256) != record.ref.size:
            await self._doubt(sha256)
        return Reading(self, record, offset, size)

    async def check(self, sha256: str, reading: Reading, *, complete: bool) -> None:
        """Compares what was read with what is known of it; raises DataLoss or Unavailable if it differs."""
        if complete and reading.is_whole:
            sound = reading.range_sha256 == sha256
        elif complete:
            known = await self._checkpoints.of_blob(sha256)
            is_weights = known is not None and (known.weights_offset, known.weights_bytes) == (
                reading.offset,
                reading.size,
            )
            sound = not is_weights or known is None or known.weights_sha256 == reading.range_sha256
        else:
            sound = False
        if not sound:
            await self._doubt(sha256)

    async def _doubt(self, sha256: str) -> None:
        condition = await self._keeper.inspect(sha256)
        if condition is Condition.GONE:
            raise blob_not_found(sha256)
        if condition.is_bad:
            raise blob_corrupt(sha256, condition.value)
        raise Unavailable(
            Reason.STORAGE_UNAVAILABLE,
            f"blob {sha256} couldn't be read in one piece, though it's sound; read it again",
            retry_after=0.5,
        )
