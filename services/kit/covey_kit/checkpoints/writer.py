"""Writes a checkpoint block by block: it's never whole in memory."""

import hashlib
import math
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from covey.v1 import checkpoint_pb2, package_pb2
from covey_kit.checkpoints.canonical import canonical_json
from covey_kit.checkpoints.container import Tensor, encode_head
from covey_kit.checkpoints.finite import first_not_finite
from covey_kit.checkpoints.problems import Kind, checkpoint_error, problem
from covey_kit.checkpoints.structure import HEADER_KEY, header_problems
from covey_kit.errors import FailedPrecondition, Reason
from covey_kit.files import sync_folder, write_all

__all__ = ["CheckpointWriter"]

_NO_DIGEST = "0" * 64
_F32_BYTES = 4


class _Region:
    """One range of the file that is filled in ascending order, with its running SHA-256."""

    def __init__(self, name: str, offset: int, elements: int) -> None:
        self.name = name
        self.offset = offset
        self.elements = elements
        self.done = 0
        self.sha256 = hashlib.sha256()

    def write(self, descriptor: int, block: npt.NDArray[np.float32], start: int) -> None:
        if block.dtype != np.dtype("<f4"):
            raise TypeError(f"{self.name}: the block has dtype {block.dtype}; expected little-endian float32")
        if start != self.done or start + block.size > self.elements:
            raise ValueError(
                f"{self.name}: a block of {block.size} elements came for element {start}; "
                f"expected element {self.done} and at most {self.elements - self.done} elements"
            )
        flat = np.ascontiguousarray(block).reshape(-1)
        wrong = first_not_finite(flat)
        if wrong is not None:
            raise FailedPrecondition(
                Reason.RESULT_NOT_FINITE,
                f"{self.name}: element {start + wrong} is {flat[wrong]}; expected finite numbers. "
                "A smaller learning rate often helps",
            )
        data = flat.view(np.uint8).data
        self.sha256.update(data)
        write_all(descriptor, data, self.offset + start * _F32_BYTES)
        self.done += flat.size


class CheckpointWriter:
    """Writes a version 2 checkpoint to `path`, which appears only when it's whole and on disk.

    Weights come through `write_weights`, optimizer tensors through `write_optimizer`, in any interleaving but
    each in ascending order; `finish` fills the digests in, writes the header and renames the file into place.
    Equal headers and numbers give equal bytes. Every method blocks: call them in a thread.

    Use it as a context manager: what wasn't finished is removed on leaving.
    """

    def __init__(
        self,
        path: Path,
        header: checkpoint_pb2.CheckpointHeader,
        parameters: Sequence[package_pb2.Parameter],
        optimizer_names: Sequence[str] = (),
    ) -> None:
        """Opens the file.

        Args:
            path: where the checkpoint will be; its folder must exist.
            header: what it says of itself. Weight count, names and digests are filled in here.
            parameters: the weight tensors in manifest order.
            optimizer_names: such as `optimizer.m`; each has as many elements as there are weights.

        Raises:
            CheckpointError: the header breaks the contract; all violations are in it.
            OSError: the file can't be made.
        """
        self._path = path
        self._header = checkpoint_pb2.CheckpointHeader()
        self._header.CopyFrom(header)
        self._tensors = _lay_out(parameters, optimizer_names)
        count = sum(math.prod(parameter.shape) for parameter in parameters)
        self._complete_header(parameters, optimizer_names, count)
        head = self._head()
        self._head_bytes = len(head)
        self._weights = _Region("weights", len(head), count)
        self._optimizer = {
            name: _Region(name, len(head) + (1 + index) * count * _F32_BYTES, count)
            for index, name in enumerate(optimizer_names)
        }
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor: int | None = os.open(self._temporary, flags, 0o644)

    def _complete_header(
        self, parameters: Sequence[package_pb2.Parameter], optimizer_names: Sequence[str], count: int
    ) -> None:
        header = self._header
        header.format_version = header.format_version or 2
        header.weight_count = count
        header.weights_sha256 = _NO_DIGEST
        header.ClearField("parameter_names")
        header.parameter_names.extend(parameter.name for parameter in parameters)
        header.ClearField("optimizer")
        for name in optimizer_names:
            header.optimizer.add(name=name, sha256=_NO_DIGEST)
        wrong = header_problems(header)
        if header.format_version != 2:
            wrong.append(f"format_version is {header.format_version}; only version 2 is written")
        if wrong:
            raise checkpoint_error(
                "the checkpoint can't be written", problem(Kind.KIND_HEADER, "; ".join(wrong))
            )

    def _head(self) -> bytes:
        return encode_head({HEADER_KEY: canonical_json(self._header)}, self._tensors)

    @property
    def weights_offset(self) -> int:
        """Where in the file the weights begin, in bytes."""
        return self._weights.offset

    @property
    def weights_bytes(self) -> int:
        """Size of the weights in bytes."""
        return self._weights.elements * _F32_BYTES

    def write_weights(self, block: npt.NDArray[np.float32], start: int) -> None:
        """Writes the next weights.

        Args:
            block: little-endian f32; any shape, taken in C order.
            start: number of its first weight in manifest order; must be the number written so far.

        Raises:
            FailedPrecondition: RESULT_NOT_FINITE, with the element's number.
            OSError: no room.
        """
        self._weights.write(self._open_descriptor(), block, start)

    def write_optimizer(self, name: str, block: npt.NDArray[np.float32], start: int) -> None:
        """Writes the next elements of one optimizer tensor, like `write_weights`."""
        self._optimizer[name].write(self._open_descriptor(), block, start)

    def finish(self) -> checkpoint_pb2.CheckpointHeader:
        """Writes the header, syncs, and renames the file into place. Returns the header with digests."""
        descriptor = self._open_descriptor()
        for region in (self._weights, *self._optimizer.values()):
            if region.done != region.elements:
                raise ValueError(f"{region.name}: {region.done} of {region.elements} elements were written")
        self._header.weights_sha256 = self._weights.sha256.hexdigest()
        for state in self._header.optimizer:
            state.sha256 = self._optimizer[state.name].sha256.hexdigest()
        head = self._head()
        if len(head) != self._head_bytes:
            raise AssertionError(f"the header grew from {self._head_bytes} to {len(head)} bytes")
        write_all(descriptor, head, 0)
        os.fsync(descriptor)
        os.close(descriptor)
        self._descriptor = None
        self._temporary.replace(self._path)
        sync_folder(self._path.parent)
        return self._header

    def close(self) -> None:
        """Removes what wasn't finished. Does nothing after `finish`."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            self._temporary.unlink(missing_ok=True)

    def _open_descriptor(self) -> int:
        if self._descriptor is None:
            raise ValueError(f"{self._path.name}: the checkpoint is already finished or closed")
        return self._descriptor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _lay_out(parameters: Sequence[package_pb2.Parameter], optimizer_names: Sequence[str]) -> list[Tensor]:
    """Places the weights one after the other in manifest order, then the optimizer's tensors."""
    names = [parameter.name for parameter in parameters] + list(optimizer_names)
    if len(set(names)) != len(names) or "__metadata__" in names:
        raise checkpoint_error(
            "the checkpoint can't be written",
            problem(Kind.KIND_TENSORS, "tensor names must differ from each other and from `__metadata__`"),
        )
    tensors: list[Tensor] = []
    end = 0
    shapes = [tuple(parameter.shape) for parameter in parameters]
    count = sum(math.prod(shape) for shape in shapes)
    shapes += [(count,)] * len(optimizer_names)
    for name, shape in zip(names, shapes, strict=True):
        begin, end = end, end + math.prod(shape) * _F32_BYTES
        tensors.append(Tensor(name, "F32", shape, begin, end))
    return tensors
