"""What the domain needs from the world: records, objects, parts. `state` implements it.

Every method may raise CoveyError where the world fails: ResourceExhausted (STORAGE_FULL) without room,
Unavailable (STORAGE_UNAVAILABLE) where a disk, bucket or database doesn't answer.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

from covey_storage.domain.model import (
    BlobRecord,
    BlobRef,
    CheckpointRecord,
    Examined,
    Expectation,
    Released,
    Totals,
)

__all__ = [
    "BlobRecords",
    "CheckpointFiles",
    "CheckpointRecords",
    "Hash",
    "Objects",
    "Part",
    "Parts",
    "References",
]


class Hash(Protocol):
    """A running digest, as `hashlib` makes them."""

    def update(self, data: bytes, /) -> None:
        """Takes the next bytes."""
        ...

    def hexdigest(self) -> str:
        """Returns the digest of what was taken, in lower-case hex."""
        ...


class BlobRecords(Protocol):
    """Which blobs there are."""

    async def get(self, sha256: str) -> BlobRecord | None:
        """Returns the record with its holders."""
        ...

    async def sizes(self, digests: Sequence[str]) -> dict[str, int]:
        """Returns the sizes of those that are visible."""
        ...

    async def known(self, digests: Sequence[str]) -> set[str]:
        """Returns those that have a record, quarantined or not."""
        ...

    async def put(self, ref: BlobRef, now: float) -> None:
        """Makes a blob visible; one that was quarantined is so no more."""
        ...

    async def quarantine(self, sha256: str) -> bool:
        """Marks a blob as damaged. False: there is no such record, or it was already marked."""
        ...

    async def remove(self, sha256: str) -> tuple[bool, tuple[str, ...]]:
        """Deletes the record of a blob that nobody holds and notes that its file must go.

        Returns (whether there was a record that is gone now, holders that stood in the way).
        """
        ...

    async def removals(self, limit: int) -> list[str]:
        """Returns digests whose files must still go."""
        ...

    async def removed(self, digests: Sequence[str]) -> None:
        """Forgets that these files must go: they're gone."""
        ...

    async def page(self, after: str, limit: int) -> list[BlobRecord]:
        """Returns the records behind a digest, by digest, with their holders."""
        ...

    async def totals(self) -> Totals:
        """Returns the sums."""
        ...


class References(Protocol):
    """Who holds which blob."""

    async def holds(self, holder: str, sha256: str) -> bool:
        """Says whether the holder references the blob."""
        ...

    async def add(self, holder: str, digests: Sequence[str]) -> list[str]:
        """References all, or none: then returns those that aren't visible."""
        ...

    async def release(self, holder: str, *, delete: bool) -> Released:
        """Drops what a holder references, its checkpoint records too.

        With `delete`, records of blobs that nobody holds any more go, and it's noted that files must.
        """
        ...


class CheckpointRecords(Protocol):
    """Which checkpoints there are."""

    async def put(self, record: CheckpointRecord, holder: str) -> CheckpointRecord:
        """Records a checkpoint and references its blob unless the round has one; returns the record."""
        ...

    async def get(self, job_id: str, round_: int | None) -> CheckpointRecord | None:
        """Returns the checkpoint of a round; with None, of the latest."""
        ...

    async def page(self, job_id: str, after: int, limit: int) -> list[CheckpointRecord]:
        """Returns the checkpoints of a job behind a round, by round."""
        ...

    async def of_blob(self, sha256: str) -> CheckpointRecord | None:
        """Returns a record of this file, if there is one."""
        ...


class Objects(Protocol):
    """The bytes of visible blobs: a folder or a bucket."""

    async def size(self, sha256: str) -> int | None:
        """Returns the size of an object; None when it isn't there."""
        ...

    async def publish(self, sha256: str, path: Path) -> None:
        """Moves a verified file in, over what is there. On return it survives a loss of power."""
        ...

    def read(self, sha256: str, offset: int, size: int, digest: Hash) -> AsyncGenerator[bytes, None]:
        """Yields a range in blocks, hashed on the way. Ends early when the object is shorter or lost."""
        ...

    async def delete(self, sha256: str) -> bool:
        """Removes an object, from the quarantine too. False when there was none."""
        ...

    async def set_aside(self, sha256: str) -> None:
        """Moves an object to the quarantine; nothing happens when it isn't there."""
        ...

    def local(self, sha256: str) -> AbstractAsyncContextManager[Path | None]:
        """Gives a file with the object's bytes (quarantined or not), None when there is none."""
        ...

    def names(self) -> AsyncIterator[Sequence[str]]:
        """Yields the digests of all objects; a stray file's whole name where it isn't one."""
        ...

    async def remove_stray(self, name: str) -> None:
        """Removes a file that `names` gave and that isn't an object."""
        ...


class Part(Protocol):
    """The part of a blob that has arrived. One task at a time."""

    @property
    def path(self) -> Path:
        """The file."""
        ...

    @property
    def size(self) -> int:
        """Bytes so far."""
        ...

    async def write(self, data: bytes) -> None:
        """Takes the next bytes."""
        ...

    async def finish(self) -> tuple[int, str]:
        """Makes it last; returns its size and SHA-256."""
        ...

    async def close(self) -> None:
        """Closes it; what has arrived is kept. Idempotent."""
        ...

    async def abort(self) -> None:
        """Closes and removes it. Idempotent."""
        ...


class Parts(Protocol):
    """Where writes that aren't finished are kept."""

    async def size(self, sha256: str) -> int:
        """Returns how much of a blob has arrived."""
        ...

    async def open(self, sha256: str, *, resume: bool) -> Part:
        """Opens the part of a blob, to go on or to begin anew."""
        ...

    async def free_bytes(self) -> int:
        """Returns how much room there is."""
        ...

    async def ages(self, now: float) -> dict[str, float]:
        """Returns for each part (by file name) how many seconds ago it grew."""
        ...

    async def remove(self, name: str) -> None:
        """Removes a part by its file name."""
        ...


class CheckpointFiles(Protocol):
    """Reads checkpoint files."""

    async def examine(self, path: Path, expectation: Expectation | None, sha256: str) -> Examined:
        """Reads a file whole and says everything that is wrong with it."""
        ...
