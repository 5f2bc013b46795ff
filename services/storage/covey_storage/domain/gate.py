"""Whether the server goes on."""

from covey_kit.errors import Reason, Unavailable

__all__ = ["Gate"]


class Gate:
    """Closed when the server drains: transfers look at it between blocks and stop, to be resumed later."""

    def __init__(self) -> None:
        self._closed = False

    def close(self) -> None:
        """Tells every transfer to stop at its next block."""
        self._closed = True

    def check(self) -> None:
        """Raises Unavailable (SHUTTING_DOWN) once closed."""
        if self._closed:
            raise Unavailable(
                Reason.SHUTTING_DOWN, "storage is shutting down; connect again and go on", retry_after=1.0
            )
