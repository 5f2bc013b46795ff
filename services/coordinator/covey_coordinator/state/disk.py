"""What a full disk is called."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from covey_kit.errors import Reason, ResourceExhausted

__all__ = ["room_for"]

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_RETRY_SECONDS: Final = 10.0


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Turns the OSError of a full disk or quota into ResourceExhausted (STORAGE_FULL).

    Args:
        what: what there is no room for, such as `the delta`.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise ResourceExhausted(
            Reason.STORAGE_FULL,
            f"no room for {what} on the coordinator's disk; free some, then it's tried again",
            retry_after=_RETRY_SECONDS,
        ) from error
