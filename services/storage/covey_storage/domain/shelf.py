"""Checkpoints: files that were read whole before they count."""

from collections.abc import Sequence

from covey_kit.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Reason,
    Violation,
)
from covey_storage.domain.errors import blob_corrupt, blob_missing, blob_not_found
from covey_storage.domain.keeper import Keeper
from covey_storage.domain.locks import KeyedLocks
from covey_storage.domain.model import (
    BlobRef,
    CheckpointRecord,
    Examined,
    Expectation,
    JobHolder,
    Problem,
)
from covey_storage.domain.pages import PageTokens
from covey_storage.domain.ports import BlobRecords, CheckpointFiles, CheckpointRecords, Objects

__all__ = ["Shelf", "record_of"]

_DEFAULT_PAGE = 100
_PART = 20
_PAGE_HEADER_BYTES = 4 << 20
"""Headers on one page: a page ends behind the one that exceeds it."""


def record_of(job_id: str, blob: BlobRef, examined: Examined) -> CheckpointRecord:
    """Returns the record of a valid file. Raises InvalidArgument (CHECKPOINT_INVALID) with every problem."""
    header, round_ = examined.header, examined.round
    offset, size, sha256 = examined.weights_offset, examined.weights_bytes, examined.weights_sha256
    complete = None not in {header, round_, offset, size, sha256}
    if examined.problems or not complete:
        raise _invalid(blob, examined.problems)
    assert header is not None and round_ is not None  # noqa: PT018 - for the type checker
    assert offset is not None and size is not None and sha256 is not None  # noqa: PT018
    return CheckpointRecord(job_id, round_, blob, header, offset, size, sha256)


def _invalid(blob: BlobRef, problems: Sequence[Problem]) -> InvalidArgument:
    violations = [Violation(p.kind + (f"[{p.tensor}]" if p.tensor else ""), p.message) for p in problems] or [
        Violation("HEADER", "the file has no weights")
    ]
    told = "; ".join(f"{v.field}: {v.description}" for v in violations[:8])
    more = f"; and {len(violations) - 8} more" if len(violations) > 8 else ""
    return InvalidArgument(
        Reason.CHECKPOINT_INVALID,
        f"blob {blob.sha256} isn't the checkpoint that was expected: {told}{more}",
        violations=violations,
        metadata={"kinds": ",".join(sorted({p.kind for p in problems}))},
        resource=("blob", blob.sha256),
    )


class Shelf:
    """The checkpoints of all jobs."""

    def __init__(
        self,
        records: CheckpointRecords,
        blobs: BlobRecords,
        objects: Objects,
        files: CheckpointFiles,
        keeper: Keeper,
        locks: KeyedLocks,
        tokens: PageTokens,
    ) -> None:
        self._records = records
        self._blobs = blobs
        self._objects = objects
        self._files = files
        self._keeper = keeper
        self._locks = locks
        self._tokens = tokens

    async def put(self, job_id: str, blob: BlobRef, expectation: Expectation) -> CheckpointRecord:
        """Reads a file whole, then records it as the job's checkpoint and references it. Idempotent.

        Raises:
            FailedPrecondition: BLOB_MISSING.
            InvalidArgument: CHECKPOINT_INVALID with every problem.
            AlreadyExists: CHECKPOINT_INVALID, the round has another checkpoint.
        """
        sizes = await self._blobs.sizes([blob.sha256])
        if sizes.get(blob.sha256) != blob.size:
            raise self._missing(blob, sizes.get(blob.sha256))
        async with self._objects.local(blob.sha256) as path:
            if path is None:
                await self._keeper.inspect(blob.sha256)
                raise blob_missing([blob.sha256])
            examined = await self._files.examine(path, expectation, blob.sha256)
        if any(problem.kind == "FILE_DIGEST" for problem in examined.problems):
            await self._keeper.inspect(blob.sha256)
        wanted = record_of(job_id, blob, examined)
        # Held against deletion: the reference must meet the blob's record.
        kept = await self._locks.run(blob.sha256, lambda: self._record(wanted))
        if kept.blob.sha256 != blob.sha256:
            raise AlreadyExists(
                Reason.CHECKPOINT_INVALID,
                f"round {kept.round} of job {job_id} has the checkpoint {kept.blob.sha256}; "
                f"{blob.sha256} can't take its place",
                metadata={"recorded": kept.blob.sha256, "offered": blob.sha256},
                resource=("checkpoint", f"{job_id}/{kept.round}"),
            )
        return kept

    async def _record(self, wanted: CheckpointRecord) -> CheckpointRecord:
        sha256 = wanted.blob.sha256
        if sha256 not in await self._blobs.sizes([sha256]):
            raise blob_missing([sha256])
        return await self._records.put(wanted, JobHolder.of(wanted.job_id))

    def _missing(self, blob: BlobRef, size: int | None) -> FailedPrecondition:
        if size is None:
            return blob_missing([blob.sha256])
        return FailedPrecondition(
            Reason.BLOB_MISSING,
            f"blob {blob.sha256} has {size} bytes; {blob.size} were named",
            resource=("blob", blob.sha256),
        )

    async def get(self, job_id: str, round_: int | None) -> CheckpointRecord:
        """Returns the checkpoint of a round; with None, of the latest. Raises NotFound."""
        record = await self._records.get(job_id, round_)
        if record is None:
            which = "no checkpoint" if round_ is None else f"no checkpoint of round {round_}"
            name = job_id if round_ is None else f"{job_id}/{round_}"
            raise NotFound(
                Reason.CHECKPOINT_NOT_FOUND, f"job {job_id} has {which}", resource=("checkpoint", name)
            )
        return record

    async def list(
        self, job_id: str, page_size: int, page_token: str
    ) -> tuple[Sequence[CheckpointRecord], str]:
        """Returns a page of a job's checkpoints by round, and the token of the next (empty: the last)."""
        listing = f"checkpoints/{job_id}"
        after = int(self._tokens.read(listing, page_token)) if page_token else -1
        size = page_size or _DEFAULT_PAGE
        found: list[CheckpointRecord] = []
        header_bytes = 0
        # In parts, since headers of large models are large: a page must fit a message, and memory.
        while True:
            # One more than is used: it shows whether anything follows.
            part = await self._records.page(job_id, after, _PART + 1)
            for record in part[:_PART]:
                if len(found) == size or header_bytes >= _PAGE_HEADER_BYTES:
                    return found, self._tokens.issue(listing, str(after))
                found.append(record)
                header_bytes += len(record.header)
                after = record.round
            if len(part) <= _PART:
                return found, ""

    async def verify(self, sha256: str, expectation: Expectation | None) -> Examined:
        """Reads a stored file whole and says everything that is wrong with it, a quarantined one's too.

        Raises NotFound, or DataLoss when the file is lost.
        """
        if await self._blobs.get(sha256) is None:
            raise blob_not_found(sha256)
        async with self._objects.local(sha256) as path:
            if path is None:
                raise blob_corrupt(sha256, "is lost")
            return await self._files.examine(path, expectation, sha256)
