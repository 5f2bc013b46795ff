"""Reads a checkpoint whole, once, block by block, and says everything that is wrong with it."""

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from covey.v1 import checkpoint_pb2, storage_service_pb2
from covey_kit.checkpoints.container import Container, ContainerError, read_container
from covey_kit.checkpoints.finite import first_not_finite
from covey_kit.checkpoints.problems import Kind, problem
from covey_kit.checkpoints.structure import Problems, check_expectation, check_tensors, read_header

__all__ = ["Examination", "examine", "verify"]

_BLOCK_BYTES = 1 << 20
_HASHES_IN_FLIGHT = 4


@dataclass(frozen=True)
class Examination:
    """What was found in a file.

    Attributes:
        problems: everything that is wrong, in order of the file; empty: it's a valid checkpoint.
        file_sha256: SHA-256 of the whole file.
        file_bytes: its size.
        header: None when it can't be read.
        weights_offset: first byte of the weights in the file; None when they aren't one whole range.
        weights_bytes: their size; None likewise.
    """

    problems: list[checkpoint_pb2.CheckpointProblem]
    file_sha256: str
    file_bytes: int
    header: checkpoint_pb2.CheckpointHeader | None = None
    weights_offset: int | None = None
    weights_bytes: int | None = None


def verify(
    path: Path,
    expectation: storage_service_pb2.CheckpointExpectation | None = None,
    expected_sha256: str | None = None,
) -> list[checkpoint_pb2.CheckpointProblem]:
    """Returns everything that is wrong with a checkpoint file; an empty list when it's valid.

    Reads versions 1 and 2. Blocks: call it in a thread. Memory: a few MiB, whatever the file's size.

    Args:
        path: the file.
        expectation: what it must fit; None: only itself.
        expected_sha256: the file's SHA-256; None: not known.

    Raises:
        OSError: the file can't be opened or read.
    """
    return examine(path, expectation, expected_sha256).problems


def examine(
    path: Path,
    expectation: storage_service_pb2.CheckpointExpectation | None = None,
    expected_sha256: str | None = None,
) -> Examination:
    """Does what `verify` does, and returns what was learnt on the way."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        plan = _plan(descriptor, expectation)
        file_bytes = os.fstat(descriptor).st_size
        with _FileHash() as file_hash:
            found = list(_read(descriptor, plan, file_bytes, file_hash))
            file_sha256 = file_hash.hexdigest()
    finally:
        os.close(descriptor)
    problems = plan.problems + found
    if expected_sha256 is not None and expected_sha256 != file_sha256:
        message = f"the file hashes to {file_sha256}; expected {expected_sha256}"
        problems.insert(0, problem(Kind.KIND_FILE_DIGEST, message))
    weights = plan.weights
    return Examination(
        problems,
        file_sha256,
        file_bytes,
        plan.header,
        None if weights is None else weights.offset,
        None if weights is None else weights.size,
    )


@dataclass(frozen=True)
class _Region:
    """Bytes with a digest of their own."""

    tensor: str
    offset: int
    size: int
    sha256: str
    kind: Kind.ValueType


@dataclass
class _Plan:
    """What to check while reading: regions in the order of the file, and what the header alone showed."""

    problems: Problems = field(default_factory=list)
    header: checkpoint_pb2.CheckpointHeader | None = None
    weights: _Region | None = None
    regions: list[_Region] = field(default_factory=list)


def _plan(descriptor: int, expectation: storage_service_pb2.CheckpointExpectation | None) -> _Plan:
    plan = _Plan()
    try:
        container = read_container(descriptor)
    except ContainerError as error:
        plan.problems.append(error.problem)
        return plan
    _check_length(container, plan.problems)
    try:
        plan.header = read_header(container)
    except ContainerError as error:
        plan.problems.append(error.problem)
        return plan
    layout, problems = check_tensors(plan.header, container)
    plan.problems += problems
    if expectation is not None:
        known = {(p.kind, p.tensor) for p in plan.problems}
        more = check_expectation(plan.header, container, expectation)
        plan.problems += [p for p in more if (p.kind, p.tensor) not in known]
    base = container.data_offset
    if layout.weights is not None:
        begin, end = layout.weights
        plan.weights = _Region(
            "", base + begin, end - begin, plan.header.weights_sha256, Kind.KIND_WEIGHTS_DIGEST
        )
        plan.regions.append(plan.weights)
    digests = {tensor.name: tensor.sha256 for tensor in plan.header.optimizer}
    for tensor in layout.optimizer:
        size = tensor.end - tensor.begin
        offset = base + tensor.begin
        plan.regions.append(
            _Region(tensor.name, offset, size, digests[tensor.name], Kind.KIND_OPTIMIZER_DIGEST)
        )
    plan.regions = [r for r in plan.regions if r.offset + r.size <= container.file_bytes]
    plan.regions.sort(key=lambda region: region.offset)
    if plan.weights not in plan.regions:
        plan.weights = None
    return plan


def _check_length(container: Container, problems: Problems) -> None:
    expected = container.data_offset + container.data_bytes
    if container.file_bytes == expected:
        return
    what = "ends before its tensors do" if container.file_bytes < expected else "has bytes behind its tensors"
    problems.append(
        problem(
            Kind.KIND_TRUNCATED, f"the file {what}: it has {container.file_bytes} bytes; expected {expected}"
        )
    )


class _FileHash:
    """SHA-256 of the whole file, in a thread of its own beside the regions' hashes."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-hash")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def update(self, block: bytes) -> None:
        if len(self._pending) >= _HASHES_IN_FLIGHT:
            self._pending.popleft().result()
        self._pending.append(self._pool.submit(self._sha256.update, block))

    def hexdigest(self) -> str:
        while self._pending:
            self._pending.popleft().result()
        return self._sha256.hexdigest()


def _blocks(descriptor: int, begin: int, end: int, file_hash: _FileHash) -> Iterator[bytes]:
    """Yields the bytes from `begin` to `end` in blocks of whole elements, the file's hash first."""
    while begin < end:
        block = os.pread(descriptor, min(_BLOCK_BYTES, end - begin), begin)
        missing = -len(block) % 4
        if missing and len(block) < end - begin:
            block += os.pread(descriptor, missing, begin + len(block))
        if not block:
            return
        file_hash.update(block)
        begin += len(block)
        yield block


def _read(
    descriptor: int, plan: _Plan, file_bytes: int, file_hash: _FileHash
) -> Iterator[checkpoint_pb2.CheckpointProblem]:
    """Reads the file from its first byte to its last; yields what is wrong with the regions."""
    place = 0
    for region in plan.regions:
        for _ in _blocks(descriptor, place, region.offset, file_hash):
            pass
        yield from _read_region(descriptor, region, file_hash)
        place = region.offset + region.size
    for _ in _blocks(descriptor, place, file_bytes, file_hash):
        pass


def _read_region(
    descriptor: int, region: _Region, file_hash: _FileHash
) -> Iterator[checkpoint_pb2.CheckpointProblem]:
    sha256 = hashlib.sha256()
    wrong: tuple[int, float] | None = None
    done = 0
    for block in _blocks(descriptor, region.offset, region.offset + region.size, file_hash):
        sha256.update(block)
        if wrong is None:
            values = np.frombuffer(block, "<f4", len(block) // 4)
            index = first_not_finite(values)
            if index is not None:
                wrong = done + index, float(values[index])
        done += len(block) // 4
    what = "optimizer state" if region.tensor else "weights"
    if sha256.hexdigest() != region.sha256:
        message = f"the {what} hash to {sha256.hexdigest()}; the header says {region.sha256}"
        yield problem(region.kind, message, region.tensor)
    if wrong is not None:
        index, value = wrong
        message = f"element {index} of the {what} is {value}; expected finite numbers"
        yield problem(Kind.KIND_NOT_FINITE, message, region.tensor)
