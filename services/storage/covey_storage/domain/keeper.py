"""Finds damage and sets it aside."""

import hashlib
from contextlib import aclosing
from enum import Enum

from covey_storage.domain.locks import KeyedLocks
from covey_storage.domain.ports import BlobRecords, Objects

__all__ = ["Condition", "Keeper"]


class Condition(Enum):
    """How a blob was found."""

    SOUND = "its bytes hash to its key"
    DAMAGED = "is damaged"
    LOST = "is lost"
    GONE = "was deleted meanwhile"

    @property
    def is_bad(self) -> bool:
        """Whether the blob was quarantined for it."""
        return self in {Condition.DAMAGED, Condition.LOST}


class Keeper:
    """The only one who quarantines: after hashing a blob whole, while nobody deletes or replaces it."""

    def __init__(self, records: BlobRecords, objects: Objects, locks: KeyedLocks) -> None:
        self._records = records
        self._objects = objects
        self._locks = locks

    async def inspect(self, sha256: str) -> Condition:
        """Hashes a blob on which a doubt fell; quarantines it when the doubt was right."""
        return await self._locks.run(sha256, lambda: self._judge(sha256))

    async def _judge(self, sha256: str) -> Condition:
        record = await self._records.get(sha256)
        if record is None:
            return Condition.GONE
        if record.quarantined:
            return Condition.DAMAGED
        size = await self._objects.size(sha256)
        if size is None:
            await self._records.quarantine(sha256)
            return Condition.LOST
        if size == record.ref.size and await self.digest(sha256, size) == sha256:
            return Condition.SOUND
        # The record first: a marked blob still in its place is moved by the next start; one that is moved and
        # not marked would look lost.
        await self._records.quarantine(sha256)
        await self._objects.set_aside(sha256)
        return Condition.DAMAGED

    async def digest(self, sha256: str, size: int) -> str:
        """Hashes an object whole."""
        digest = hashlib.sha256()
        async with aclosing(self._objects.read(sha256, 0, size, digest)) as blocks:
            async for _ in blocks:
                pass
        return digest.hexdigest()
