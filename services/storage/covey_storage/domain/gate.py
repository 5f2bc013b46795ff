"""Whether a transfer may begin, and whether it goes on."""

from collections.abc import Iterator
from contextlib import contextmanager

from covey_kit.errors import Reason, Unavailable

__all__ = ["Gate"]


class Gate:
    """Bounds transfers, each of which holds a few MiB; closes when the server drains.

    Args:
        most: transfers at the same time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open = 0
        self._closed = False

    def close(self) -> None:
        """Tells every transfer to stop at its next block: it can be resumed later."""
        self._closed = True

    def check(self) -> None:
        """Raises Unavailable (SHUTTING_DOWN) once closed. For between blocks."""
        if self._closed:
            raise Unavailable(
                Reason.SHUTTING_DOWN, "storage is shutting down; connect again and go on", retry_after=1.0
            )

    @contextmanager
    def transfer(self) -> Iterator[None]:
        """One transfer. Raises Unavailable (SHUTTING_DOWN, or LIMIT_EXCEEDED when there are too many)."""
        self.check()
        if self._open >= self._most:
            raise Unavailable(
                Reason.LIMIT_EXCEEDED,
                f"storage serves {self._open} transfers already, as many as it may; try again soon",
                retry_after=1.0,
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
