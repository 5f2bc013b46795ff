"""Time, injected so that decisions can be tested without waiting."""

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]


class Clock(Protocol):
    """Where time comes from."""

    def now(self) -> float:
        """Returns the wall-clock time in seconds since 1970-01-01 UTC. May jump."""
        ...

    def monotonic(self) -> float:
        """Returns seconds since an arbitrary point. Never jumps back."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> float:
        """Returns the wall-clock time in seconds since 1970-01-01 UTC."""
        return time.time()

    def monotonic(self) -> float:
        """Returns seconds since the machine started, about."""
        return time.monotonic()
