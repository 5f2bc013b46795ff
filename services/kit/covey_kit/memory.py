"""Memory settings of the process."""

import ctypes
import sys

__all__ = ["tune_malloc"]

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune_malloc() -> bool:
    """Keeps glibc from returning each bulk message's memory to the kernel.

    Messages of 256 KiB and more otherwise cost two to four times as much, since each is mapped and
    unmapped anew. Call before any traffic. Returns False where there is no glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_M_TRIM_THRESHOLD, 256 << 20))
