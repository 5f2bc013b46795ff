"""Processes that end when the one that started them does."""

import ctypes
import os
import signal
import sys

__all__ = ["PARENT_VARIABLE", "tie_to_parent"]

PARENT_VARIABLE = "COVEY_PARENT_PID"
"""Set for children that must end with their parent."""

_PR_SET_PDEATHSIG = 1


def tie_to_parent() -> None:
    """Makes this process end (SIGTERM) when the parent that started it does, if that parent asked for it.

    The child does it for itself, so that nothing has to run between fork and exec.
    """
    wanted = os.environ.pop(PARENT_VARIABLE, None)
    if wanted is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(wanted):  # it ended before we asked
        sys.exit(1)
