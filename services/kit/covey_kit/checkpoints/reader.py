"""Reads parts of a checkpoint."""

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from covey.v1 import checkpoint_pb2
from covey_kit.checkpoints.container import ContainerError, read_container
from covey_kit.checkpoints.problems import Kind, checkpoint_error, problem
from covey_kit.checkpoints.structure import check_tensors, read_header

__all__ = ["CheckpointReader"]


class CheckpointReader:
    """An open checkpoint of version 1 or 2, whose header agrees with its tensors.

    The tensors' bytes aren't hashed here: call `verify` first on a file that you didn't just write.
    Every method blocks: call them in a thread. Use it as a context manager.

    Attributes:
        header: what the checkpoint says of itself.
        weights_offset: first byte of the weights in the file.
        weights_bytes: their size: 4 × the weight count.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            CheckpointError: it isn't a checkpoint that can be read; all problems are in it.
            OSError: it can't be opened.
        """
        self._path = path
        self._descriptor: int | None = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._open(self._descriptor)
        except BaseException:
            self.close()
            raise

    def _open(self, descriptor: int) -> None:
        try:
            container = read_container(descriptor)
            self.header: checkpoint_pb2.CheckpointHeader = read_header(container)
        except ContainerError as error:
            raise checkpoint_error(self._path.name, error.problem) from None
        layout, problems = check_tensors(self.header, container)
        end = container.data_offset + container.data_bytes
        if container.file_bytes != end:
            message = f"the file has {container.file_bytes} bytes; expected {end}"
            problems.insert(0, problem(Kind.KIND_TRUNCATED, message))
        if problems or layout.weights is None:
            raise checkpoint_error(self._path.name, *problems)
        begin, end = layout.weights
        self.weights_offset = container.data_offset + begin
        self.weights_bytes = end - begin
        self._optimizer = {t.name: container.data_offset + t.begin for t in layout.optimizer}

    @property
    def optimizer_names(self) -> tuple[str, ...]:
        """Names of the optimizer's tensors, in the header's order."""
        return tuple(self._optimizer)

    def read_weights(self, start: int = 0, count: int | None = None) -> npt.NDArray[np.float32]:
        """Returns weights in manifest order as a new flat f32 array.

        Args:
            start: the first one.
            count: how many; None: all that follow.

        Raises:
            ValueError: the range lies outside the weights.
            CheckpointError: the file shrank meanwhile.
        """
        return self._read("the weights", self.weights_offset, start, count)

    def read_optimizer(self, name: str, start: int = 0, count: int | None = None) -> npt.NDArray[np.float32]:
        """Returns elements of one optimizer tensor, like `read_weights`. KeyError: no such tensor."""
        return self._read(name, self._optimizer[name], start, count)

    def _read(self, what: str, offset: int, start: int, count: int | None) -> npt.NDArray[np.float32]:
        if self._descriptor is None:
            raise ValueError(f"{self._path.name}: the checkpoint is closed")
        total = self.header.weight_count
        if count is None:
            count = max(total - start, 0)
        if start < 0 or count < 0 or start + count > total:
            raise ValueError(f"{what}: elements {start} to {start + count} were asked for; there are {total}")
        values = np.empty(count, "<f4")
        view = values.data.cast("B") if count else memoryview(b"")
        place = offset + 4 * start
        while view.nbytes:
            done = os.preadv(self._descriptor, [view], place)
            if done == 0:
                raise checkpoint_error(
                    self._path.name, problem(Kind.KIND_TRUNCATED, f"the file ends at byte {place}")
                )
            view = view[done:]
            place += done
        return values

    def close(self) -> None:
        """Closes the file; idempotent."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
