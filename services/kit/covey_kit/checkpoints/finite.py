"""Whether numbers are numbers."""

import numpy as np
import numpy.typing as npt

__all__ = ["first_not_finite"]


def first_not_finite(block: npt.NDArray[np.float32]) -> int | None:
    """Returns the index of the first NaN or infinity of a flat f32 array; None when there is none."""
    with np.errstate(all="ignore"):
        # Any NaN or infinity makes the sum of squares not finite; so do large numbers, hence the second look.
        if np.isfinite(np.dot(block, block)):
            return None
    finite = np.isfinite(block)
    if finite.all():
        return None
    return int(np.argmin(finite))
