"""How long to wait before trying again."""

from collections.abc import Callable


class Backoff:
    """Doubling waits with full jitter in their upper half, so that a herd doesn't come back at once.

    Args:
        first: the first wait at most, in seconds.
        most: bound of every wait.
        uniform: returns a random number in [0, 1).
    """

    def __init__(self, first: float, most: float, uniform: Callable[[], float]) -> None:
        self._first = first
        self._most = most
        self._uniform = uniform
        self._tries = 0

    def next(self) -> float:
        """Returns the seconds to wait before the next try: between half and all of min(most, first · 2ⁿ)."""
        bound = min(self._most, self._first * 2.0 ** min(self._tries, 32))
        self._tries += 1
        return bound * (0.5 + 0.5 * self._uniform())

    def reset(self) -> None:
        """Begins anew, after a success."""
        self._tries = 0
