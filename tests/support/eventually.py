"""Waiting for something to come true, with a deadline: the only way in which tests poll."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar, overload

T = TypeVar("T")


@overload
async def eventually(
    condition: Callable[[], Awaitable[T]], timeout: float = ..., message: str = ..., interval: float = ...
) -> T: ...


@overload
async def eventually(
    condition: Callable[[], T], timeout: float = ..., message: str = ..., interval: float = ...
) -> T: ...


async def eventually(
    condition: Callable[[], T | Awaitable[T]],
    timeout: float = 10.0,
    message: str = "",
    interval: float = 0.01,
) -> T:
    """Calls `condition` until its result is truthy, and returns that result.

    `condition` is a plain or an async function. An AssertionError that it raises counts as "not yet", so that
    it can be written as assertions (ending in `return True`). After `timeout` seconds an AssertionError tells
    `message`, how long it waited, and the last result or failure. Other exceptions pass at once.
    """
    deadline = time.monotonic() + timeout
    while True:
        last: object
        failure: AssertionError | None = None
        try:
            outcome = condition()
            value = await outcome if inspect.isawaitable(outcome) else outcome
            if value:
                return value
            last = value
        except AssertionError as error:
            last, failure = error, error
        if time.monotonic() >= deadline:
            what = message or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"not within {timeout:g} s: {what} (last: {last!r})") from failure
        await asyncio.sleep(interval)
