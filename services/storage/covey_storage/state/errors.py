"""What the system says, in Covey's words."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from obstore.exceptions import BaseError
from sqlalchemy.exc import DBAPIError

from covey_kit.errors import Reason, ResourceExhausted, Unavailable

__all__ = ["world_errors"]

log = structlog.get_logger()

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_RETRY_SECONDS = 1.0


@contextmanager
def world_errors() -> Iterator[None]:
    """Turns failures of disk, bucket and database into CoveyErrors; their text goes to the log alone."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise ResourceExhausted(
                Reason.STORAGE_FULL, "storage is full: delete what nobody needs, then go on"
            ) from error
        log.exception("the disk failed")
        raise Unavailable(
            Reason.STORAGE_UNAVAILABLE, "storage's disk failed; its log says how", retry_after=_RETRY_SECONDS
        ) from error
    except BaseError as error:
        log.exception("the bucket failed")
        raise Unavailable(
            Reason.STORAGE_UNAVAILABLE,
            "storage's bucket failed; its log says how",
            retry_after=_RETRY_SECONDS,
        ) from error
    except DBAPIError as error:
        log.exception("the database failed")
        if "full" in str(error.orig).lower():
            raise ResourceExhausted(
                Reason.STORAGE_FULL, "storage is full: delete what nobody needs, then go on"
            ) from error
        raise Unavailable(
            Reason.STORAGE_UNAVAILABLE,
            "storage's database failed; its log says how",
            retry_after=_RETRY_SECONDS,
        ) from error
