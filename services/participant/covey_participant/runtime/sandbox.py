"""Takes away from a worker process what it doesn't need, before it sees a byte of a package.

WebAssembly is the wall; this is what stands behind it should the wall have a hole, and what makes sure that a
worker never outlives its parent.
"""

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

MOST_FILE_BYTES = (4 << 30) + (64 << 20)
"""A result is at most the linear memory (4 GiB); compiled code is far below the rest."""

MOST_FILES = 64
OOM_SCORE = 800

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


def die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the thread that started it ends; ends it if that has happened."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def harden() -> None:
    """Bounds files, cores, processes and privileges; makes it the first to go when memory runs out."""
    os.umask(0o077)
    os.chdir("/")
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: MOST_FILE_BYTES,
        resource.RLIMIT_NOFILE: MOST_FILES,
        resource.RLIMIT_NPROC: 0,  # not even a thread; has no force over root
    }
    for which, most in limits.items():
        _, hard = resource.getrlimit(which)
        bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (bound, bound))
    if sys.platform == "linux":
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")
