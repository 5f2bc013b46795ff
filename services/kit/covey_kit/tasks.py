"""Work that mustn't be left half done."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

__all__ = ["uninterrupted"]

T = TypeVar("T")


async def uninterrupted(work: Awaitable[T]) -> T:
    """Runs `work` to its end, even when the caller is cancelled meanwhile; raises that afterwards.

    For short steps whose interruption would leave two things apart that belong together, and for threads,
    which can't be stopped anyway: what they use must not be closed under them.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()  # seen: the cancellation is what the caller hears of
        raise
