"""Errors that several use cases raise, worded once."""

from covey_kit.errors import DataLoss, FailedPrecondition, NotFound, Reason

__all__ = ["blob_corrupt", "blob_missing", "blob_not_found"]

_NAMED = 20


def blob_not_found(sha256: str) -> NotFound:
    """There is no such blob."""
    return NotFound(Reason.BLOB_NOT_FOUND, f"no blob {sha256}", resource=("blob", sha256))


def blob_corrupt(sha256: str, what: str) -> DataLoss:
    """The bytes of a blob are damaged or lost."""
    return DataLoss(
        Reason.BLOB_CORRUPT,
        f"blob {sha256} {what}; it's quarantined: write it again to mend it",
        resource=("blob", sha256),
    )


def blob_missing(digests: list[str]) -> FailedPrecondition:
    """Blobs that a request names aren't there."""
    named = ", ".join(digests[:_NAMED]) + (
        f" and {len(digests) - _NAMED} more" if len(digests) > _NAMED else ""
    )
    return FailedPrecondition(
        Reason.BLOB_MISSING,
        f"{len(digests)} blobs aren't in storage: {named}; write them first, then call again",
        metadata={"missing": ",".join(digests[:100])},
        resource=("blob", digests[0]),
    )
