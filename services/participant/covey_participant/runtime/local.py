"""A package's module on this machine, without a coordinator: check it, count its examples, predict with it.

The module runs as in training: in a hardened worker process, within the package's limits. These functions
block; call them in a thread from a coroutine.
"""

import asyncio
import hashlib
import tempfile
import threading
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from covey.v1 import package_pb2
from covey_kit.errors import InvalidArgument
from covey_participant import convert
from covey_participant.domain.failure import WorkFailure
from covey_participant.runtime.cpu import DeviceLimits, module_spec, time_limits
from covey_participant.runtime.pool import WorkerPool
from covey_participant.runtime.protocol import (
    ChunkFile,
    ConfigSpec,
    FileRange,
    Job,
    ModuleSpec,
    Outcome,
    Task,
)

__all__ = ["LocalRunner", "check_module", "count_examples", "predict"]

T = TypeVar("T")

_ITEM_BYTES = {package_pb2.TensorSpec.U8: 1, package_pb2.TensorSpec.I32: 4, package_pb2.TensorSpec.F32: 4}


class LocalRunner:
    """Keeps a worker process for several calls. Use it as a context manager.

    Args:
        limits: the device's own bounds, besides the package's.
    """

    def __init__(self, limits: DeviceLimits | None = None) -> None:
        self._limits = limits or DeviceLimits()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="covey-local", daemon=True)
        self._pool: WorkerPool | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="covey-local-")
        # The thread lives as long as the workers: the kernel ends them with the thread that started them.
        self._thread.start()
        self._pool = self._await(self._make_pool())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._await(self._pool.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if self._folder is not None:
            self._folder.cleanup()

    def check_module(self, manifest: package_pb2.ModelPackage, module: Path) -> list[str]:
        """Returns everything that is wrong with a module, nothing if it is right.

        It must load, export what its capabilities need, speak ABI 1, and make as many finite weights as the
        manifest declares.

        Raises:
            InvalidArgument: the check itself couldn't be done.
        """
        spec = self._spec(manifest, module)
        found = self._run(manifest, Job(Task.CHECK, spec))
        if found.problems:
            return found.problems
        job = Job(Task.INITIALIZE, spec, _default_config(manifest), output=str(self._file("weights")))
        try:
            self._run(manifest, job)
        except InvalidArgument as error:
            return [error.message]
        return []

    def count_examples(
        self, manifest: package_pb2.ModelPackage, module: Path, chunks: Sequence[Path]
    ) -> list[int]:
        """Returns the number of examples in each file, as the module's loader counts them.

        Raises:
            InvalidArgument: the module refuses a file, in its own words.
        """
        spec = replace(self._spec(manifest, module), work=False)
        config = _default_config(manifest)
        return [
            self._run(
                manifest,
                Job(Task.COUNT, spec, config, chunks=[ChunkFile(str(path.absolute()))]),
                of=path.name,
            ).units
            for path in chunks
        ]

    def predict(
        self,
        manifest: package_pb2.ModelPackage,
        module: Path,
        weights: npt.NDArray[np.float32],
        data: bytes,
        capacity: int | None = None,
    ) -> bytes:
        """Runs one inference.

        Args:
            manifest: the package's.
            module: its WebAssembly file.
            weights: flat f32, in manifest order.
            data: the input tensors, one after the other.
            capacity: most bytes of output; None: what the manifest's outputs take.

        Returns:
            The output tensors, one after the other.

        Raises:
            InvalidArgument: the module refuses the input, in its own words.
        """
        flat = np.ascontiguousarray(weights, "<f4").reshape(-1)
        base, source, target = self._file("weights"), self._file("input"), self._file("output")
        flat.tofile(base)
        source.write_bytes(data)
        job = Job(
            Task.PREDICT,
            replace(self._spec(manifest, module), inference=True),
            _default_config(manifest),
            weights=FileRange(str(base), 0, flat.nbytes),
            weights_sha256=hashlib.sha256(flat.data).hexdigest(),
            input=str(source),
            output=str(target),
            output_bytes=output_bytes(manifest) if capacity is None else capacity,
        )
        self._run(manifest, job)
        return target.read_bytes()

    def _spec(self, manifest: package_pb2.ModelPackage, module: Path) -> ModuleSpec:
        package = convert.package_from_proto(manifest)
        digest = hashlib.sha256(module.read_bytes()).hexdigest()
        spec = module_spec(package, module.absolute(), self._file("compiled"), self._limits)
        return replace(spec, sha256=digest)

    def _run(self, manifest: package_pb2.ModelPackage, job: Job, of: str = "") -> Outcome:
        assert self._pool is not None, "use it as a context manager"
        limits = time_limits(convert.package_from_proto(manifest), self._limits)
        try:
            return self._await(self._pool.run(job, limits))
        except WorkFailure as failure:
            message = f"{of}: {failure.message}" if of else failure.message
            raise InvalidArgument(failure.reason, message) from failure

    def _file(self, name: str) -> Path:
        assert self._folder is not None, "use it as a context manager"
        return Path(self._folder.name) / name

    async def _make_pool(self) -> WorkerPool:
        return WorkerPool()

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def output_bytes(manifest: package_pb2.ModelPackage) -> int:
    """Returns the bytes of a prediction, all outputs together."""
    total = 0
    for tensor in manifest.inference.outputs:
        size = _ITEM_BYTES[tensor.dtype]
        for extent in tensor.shape:
            size *= extent
        total += size
    return total


def _default_config(manifest: package_pb2.ModelPackage) -> ConfigSpec:
    config = convert.default_config(manifest)
    return ConfigSpec(
        config.seed,
        config.batch_size,
        config.learning_rate,
        config.local_epochs,
        list(config.hyperparameters),
    )


def check_module(manifest: package_pb2.ModelPackage, module: Path) -> list[str]:
    """Does `LocalRunner.check_module` in a worker of its own."""
    with LocalRunner() as runner:
        return runner.check_module(manifest, module)


def count_examples(manifest: package_pb2.ModelPackage, module: Path, chunks: Sequence[Path]) -> list[int]:
    """Does `LocalRunner.count_examples` in a worker of its own."""
    with LocalRunner() as runner:
        return runner.count_examples(manifest, module, chunks)


def predict(
    manifest: package_pb2.ModelPackage,
    module: Path,
    weights: npt.NDArray[np.float32],
    data: bytes,
    capacity: int | None = None,
) -> bytes:
    """Does `LocalRunner.predict` in a worker of its own."""
    with LocalRunner() as runner:
        return runner.predict(manifest, module, weights, data, capacity)
