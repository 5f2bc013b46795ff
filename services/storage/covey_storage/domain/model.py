"""The words of storage."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = [
    "DIGEST",
    "BlobRecord",
    "BlobRef",
    "CheckpointRecord",
    "Examined",
    "Expectation",
    "JobHolder",
    "Problem",
    "Released",
    "Totals",
]

DIGEST = re.compile(r"[0-9a-f]{64}")
"""A SHA-256 as everything here writes it. Matched whole before a digest becomes a file's name."""


@dataclass(frozen=True)
class BlobRef:
    """A blob by its content.

    Attributes:
        sha256: 64 lower-case hex digits.
        size: bytes.
    """

    sha256: str
    size: int


@dataclass(frozen=True)
class BlobRecord:
    """A blob as recorded.

    Attributes:
        ref: the content.
        create_time: when it became visible, Unix seconds.
        quarantined: its bytes were found damaged or lost; it isn't served.
        holders: who references it, sorted.
    """

    ref: BlobRef
    create_time: float
    quarantined: bool = False
    holders: tuple[str, ...] = ()


@dataclass(frozen=True)
class Totals:
    """What is stored, in numbers. Unreferenced blobs are visible ones that nobody holds."""

    blob_count: int = 0
    blob_bytes: int = 0
    unreferenced_count: int = 0
    unreferenced_bytes: int = 0
    quarantined_count: int = 0
    checkpoint_count: int = 0


@dataclass(frozen=True)
class Released:
    """What a holder let go.

    Attributes:
        references: references dropped.
        freed: blobs whose records went with them; their files are still to be removed.
    """

    references: int
    freed: tuple[BlobRef, ...] = ()


@dataclass(frozen=True)
class CheckpointRecord:
    """The checkpoint of a job's round.

    Attributes:
        job_id: the job that made it.
        round: whose result it is.
        blob: the file.
        header: the `CheckpointHeader` as bytes: the domain doesn't look inside.
        weights_offset: first byte of the weights in the file.
        weights_bytes: their size.
        weights_sha256: their digest.
    """

    job_id: str
    round: int
    blob: BlobRef
    header: bytes = field(repr=False)
    weights_offset: int
    weights_bytes: int
    weights_sha256: str


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a checkpoint file.

    Attributes:
        kind: name of the `CheckpointProblem.Kind` without prefix, such as `WEIGHTS_DIGEST`.
        message: where, what was expected, what was found.
        tensor: the tensor it's about; empty where it's about none.
    """

    kind: str
    message: str
    tensor: str = ""


@dataclass(frozen=True)
class Expectation:
    """What a checkpoint must fit. Empty strings and None: anything.

    Attributes:
        parameters: shapes by name, in manifest order; empty: any.
    """

    parameters: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    package_name: str = ""
    package_version: str = ""
    module_sha256: str = ""
    round: int | None = None


@dataclass(frozen=True)
class Examined:
    """What reading a checkpoint file whole showed.

    Attributes:
        problems: everything that is wrong, in order of the file; empty: it's valid.
        header: the `CheckpointHeader` as bytes; None when it can't be read.
        round: whose result it says it is; None (as what follows) without header or whole weights.
        weights_offset: first byte of the weights.
        weights_bytes: their size.
        weights_sha256: their digest by the header.
    """

    problems: tuple[Problem, ...]
    header: bytes | None = None
    round: int | None = None
    weights_offset: int | None = None
    weights_bytes: int | None = None
    weights_sha256: str | None = None


class JobHolder:
    """The holder that stands for a job: what it references, the job's grants may read."""

    _PREFIX = "jobs/"

    @classmethod
    def of(cls, job_id: str) -> str:
        """Returns the holder of a job."""
        return cls._PREFIX + job_id

    @classmethod
    def job_of(cls, holder: str) -> str | None:
        """Returns the job that a holder stands for; None when it isn't a job's."""
        return holder.removeprefix(cls._PREFIX) if holder.startswith(cls._PREFIX) else None
