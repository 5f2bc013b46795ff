"""Runs a package's shader plan on this machine's GPU, in this process: for tests and benchmarks of plans.

A participant does the same in a process of its own (a GPU error may take its process with it); here the parts
are the same: the reader of archives, the check of plans, the executor.
"""

import functools
import os
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from covey_participant.domain.values import Adapter
from covey_participant.runtime.gpu.adapters import describe, ranked
from covey_participant.runtime.gpu.archive import read_archive
from covey_participant.runtime.gpu.assess import assess
from covey_participant.runtime.gpu.device import Device
from covey_participant.runtime.gpu.executor import Executor
from covey_participant.runtime.gpu.facts import PackageFacts
from covey_participant.runtime.gpu.inputs import Minibatch
from covey_participant.runtime.gpu.plan import Phase, Plan
from covey_participant.runtime.gpu.run import Run, Totals

from .packages import OWN_FIELDS, manifest
from .wasm_harness import EVALUATE, STREAM_EVALUATE, STREAM_TRAIN, TRAIN, WasmModule

Array = np.ndarray[Any, Any]

WEBGPU_DEFAULTS = {
    "max-bind-groups": 4,
    "max-bindings-per-bind-group": 1000,
    "max-buffer-size": 256 << 20,
    "max-compute-invocations-per-workgroup": 256,
    "max-compute-workgroup-size-x": 256,
    "max-compute-workgroup-size-y": 256,
    "max-compute-workgroup-size-z": 64,
    "max-compute-workgroup-storage-size": 16384,
    "max-compute-workgroups-per-dimension": 65535,
    "max-storage-buffer-binding-size": 128 << 20,
    "max-storage-buffers-per-shader-stage": 8,
    "max-uniform-buffer-binding-size": 65536,
    "max-uniform-buffers-per-shader-stage": 12,
}
"""What every WebGPU device offers: the table "Limits" of the WebGPU specification, defaults."""


@functools.cache
def adapter() -> Adapter | str:
    """The best adapter of this machine, or why there is none."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.mkdtemp(prefix="covey-gpu-"))
    try:
        import wgpu

        found = ranked(wgpu.gpu.enumerate_adapters_sync())
    except (ImportError, OSError, RuntimeError) as error:
        return f"needs a GPU or a software Vulkan driver (`make gpu` installs one): {error}"
    if not found:
        return "needs a GPU or a software Vulkan driver (`make gpu` installs one), found no adapter"
    return describe(found[0])


@functools.cache
def device() -> Device:
    """The adapter, opened once for all tests of a process."""
    found = adapter()
    assert isinstance(found, Adapter), found
    return Device.open(found.name, found.api, ())


class GpuModel:
    """A package that trains and evaluates on the GPU, fed by its own module.

    Args:
        own: the model's own hyperparameters in manifest order.
    """

    def __init__(
        self, package: Path, own: list[float], *, seed: int = 1, batch: int, rate: float, epochs: int = 1
    ) -> None:
        self._epochs = epochs
        self._tensors = sum(buffer.HasField("tensor") for buffer in archive(package).plan.buffers)
        self.module = WasmModule(package / "model.wasm")
        self.module.configure(own, seed=seed, batch=batch, rate=rate, epochs=epochs)
        about = facts(package, own, batch=batch, rate=rate, epochs=epochs)
        self._values = about.hyperparameters
        self.plan = checked_plan(package, about)
        self.executor = Executor(device(), self.plan)

    def set_weights(self, values: Array) -> None:
        """Writes the weights, in manifest order."""
        self.executor.weights.write(values)

    def weights(self) -> Array:
        """A copy of the weights."""
        return self.executor.weights.read()

    def stream(self, phase: int, first: int, units: int) -> Iterator[Minibatch]:
        """The minibatches that the module makes of what it has loaded."""
        left = units * (self._epochs if phase in (TRAIN, STREAM_TRAIN) else 1)
        self.module.check("begin", STREAM_TRAIN if phase == TRAIN else STREAM_EVALUATE, first, units)
        while left:
            before, left = left, self.module.check("step")
            yield Minibatch(before - left, {i: self.module.tensor(i, "<u4") for i in range(self._tensors)})

    def totals(self, phase: int, first: int, units: int) -> Iterator[Totals]:
        """Trains or evaluates on units of what `module` has loaded: what is known after each wait."""
        steps = {TRAIN: Phase.TRAIN, EVALUATE: Phase.EVALUATE}[phase]
        run = Run(self.executor, steps, self.stream(phase, first, units), self._values)
        more = True
        while more:
            more = run.advance()
            yield run.totals

    def run(self, phase: int, first: int, units: int) -> list[float | None]:
        """The same to its end; returns the metrics' means."""
        *_, last = self.totals(phase, first, units)
        return [float(total / over) if over else None for total, over in last.metrics]

    def close(self) -> None:
        """Gives back the GPU's memory."""
        self.executor.close()


@functools.cache
def archive(package: Path) -> Any:
    """The package's shader archive, read as a participant reads it."""
    return read_archive((package / manifest(package)["shaderArchive"]["fileName"]).read_bytes())


def facts(package: Path, own: list[float], *, batch: int, rate: float = 0.1, epochs: int = 1) -> PackageFacts:
    """What a plan is checked against: the manifest's, with these settings."""
    declared = manifest(package)
    names = [item["name"] for item in declared["hyperparameters"] if item["name"] not in OWN_FIELDS]
    return PackageFacts(
        parameters={item["name"]: prod(item["shape"]) for item in declared["parameters"]},
        hyperparameters={
            **dict(zip(names, own, strict=True)),
            "batchSize": float(batch),
            "learningRate": rate,
            "localEpochs": float(epochs),
        },
        metrics=len(declared["metrics"]),
    )


def checked_plan(package: Path, about: PackageFacts, on: Adapter | None = None) -> Plan:
    """The package's plan for an adapter (without `on`: this machine's); raises what is wrong with it."""
    found = assess(archive(package), about, on or device().facts)
    if found.plan is None:
        raise found.error()
    return found.plan
