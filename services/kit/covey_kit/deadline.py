"""What is left of the deadline of the call being handled.

Bound to the task that handles the call: tasks that the handler starts outlive the call and have
no deadline of its own.
"""

import asyncio
from contextvars import ContextVar

__all__ = ["remaining", "set_deadline"]

_deadline: ContextVar[tuple[asyncio.Task[object] | None, float] | None] = ContextVar(
    "covey_deadline", default=None
)


def set_deadline(seconds: float) -> None:
    """Sets the deadline of the current task to `seconds` from now. For the interceptor."""
    _deadline.set((asyncio.current_task(), asyncio.get_running_loop().time() + seconds))


def remaining() -> float | None:
    """Returns the seconds left (≥ 0), or None when the current task handles no call with a deadline."""
    found = _deadline.get()
    if found is None:
        return None
    task, at = found
    try:
        if task is not asyncio.current_task():
            return None
        return max(0.0, at - asyncio.get_running_loop().time())
    except RuntimeError:  # no loop: not handling anything
        return None
