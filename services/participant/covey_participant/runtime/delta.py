"""Results: new − base weights, checked, hashed and written block by block."""

import hashlib
import math
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from covey_kit.errors import Reason
from covey_kit.files import write_all
from covey_participant.domain.failure import WorkFailure

from .instance import F32Array

BLOCK = 1 << 18
"""Elements of a block: 1 MiB."""


class DeltaWriter:
    """Writes results; a thread of its own hashes one block while the next is made and written.

    The thread is started at once: later, the process may start none.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "hash")
        self._thread.submit(int).result()

    def write(self, path: Path, weights: F32Array, base: F32Array | None) -> str:
        """Writes new − base (or, without a base, the weights themselves) and returns the file's SHA-256.

        Raises:
            WorkFailure: `RESULT_NOT_FINITE` names the first weight that isn't finite; `DEVICE`: no room.
        """
        digest = hashlib.sha256()
        buffers = [np.empty(min(BLOCK, weights.size), np.float32) for _ in range(2)]
        hashing: Future[None] | None = None
        try:
            # A new file: truncating an old one makes some file systems write it out first.
            path.unlink(missing_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                for start in range(0, weights.size, BLOCK):
                    delta = buffers[(start // BLOCK) % 2][: min(BLOCK, weights.size - start)]
                    _subtract(weights, base, start, delta)
                    _check_finite(delta, start)
                    if hashing is not None:
                        hashing.result()
                    hashing = self._thread.submit(digest.update, delta.data)
                    write_all(descriptor, delta.data.cast("B"), 4 * start)
                if hashing is not None:
                    hashing.result()
            finally:
                os.close(descriptor)
        except OSError as error:
            raise WorkFailure(Reason.DEVICE, f"the result can't be written: {error.strerror}") from error
        return digest.hexdigest()


def _subtract(weights: F32Array, base: F32Array | None, start: int, out: F32Array) -> None:
    block = weights[start : start + out.size]
    if base is None:
        out[:] = block
    else:
        with np.errstate(all="ignore"):  # what isn't finite is found below
            np.subtract(block, base[start : start + out.size], out=out)


def _check_finite(block: F32Array, start: int) -> None:
    # The dot product is the fast way; large finite values may overflow it, so its no isn't final.
    with np.errstate(all="ignore"):
        if math.isfinite(float(np.dot(block, block))):
            return
    finite = np.isfinite(block)
    if not finite.all():
        first = int(np.argmin(finite))
        raise WorkFailure(
            Reason.RESULT_NOT_FINITE,
            f"weight {start + first} changed by {block[first]}: the module's new weights aren't finite",
        )
