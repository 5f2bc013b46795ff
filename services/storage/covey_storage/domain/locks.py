"""One at a time, by name."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from covey_kit.tasks import uninterrupted

__all__ = ["KeyedLocks"]

T = TypeVar("T")


class KeyedLocks:
    """A lock for each key in use. What makes a file and its record change together holds the blob's."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    async def run(self, key: str, work: Callable[[], Awaitable[T]]) -> T:
        """Waits for the key, then runs `work` to its end, even when the caller is cancelled meanwhile."""
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = lock, users + 1
        try:
            async with lock:
                return await uninterrupted(work())
        finally:
            lock, users = self._locks[key]
            if users == 1:
                del self._locks[key]
            else:
                self._locks[key] = lock, users - 1
