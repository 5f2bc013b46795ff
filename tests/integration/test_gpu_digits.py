"""The packages that ship with Covey train on the GPU worker as they do on the CPU's."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from google.protobuf import json_format

from covey.v1 import package_pb2
from covey_participant import convert
from covey_participant.domain.backend import Choice, Fallback, choose_backend
from covey_participant.domain.ports import Inputs
from covey_participant.domain.values import (
    Adapter,
    Assignment,
    Backend,
    Blob,
    Chunk,
    Config,
    DeviceSettings,
    HeldOut,
    Kind,
    Package,
    Preference,
    Result,
    Weights,
)
from covey_participant.runtime.cpu import DeviceLimits
from covey_participant.runtime.gpu.runner import BackendRunner
from covey_participant.runtime.gpu.supervisor import GpuPool
from covey_participant.runtime.pool import WorkerPool
from support.gpu_device import require_adapter
from support.packages import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

CPU = Choice(Backend.CPU_WASM, Fallback.PREFERENCE, "")
EVALUATED = 512


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    """The adapter of this machine."""
    return require_adapter()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pools() -> AsyncIterator[tuple[WorkerPool, GpuPool]]:
    """Both pools."""
    made = WorkerPool(), GpuPool()
    yield made
    for pool in made:
        await pool.close()


def blob(path: Path) -> Blob:
    """A file as a blob."""
    content = path.read_bytes()
    return Blob(hashlib.sha256(content).hexdigest(), len(content))


class Shipped:
    """A package of the repository, with a runner for its assignments."""

    def __init__(self, name: str, scratch: Path, pools: tuple[WorkerPool, GpuPool]) -> None:
        self.folder = MODELS / name
        manifest = json_format.Parse((self.folder / "manifest.json").read_text(), package_pb2.ModelPackage())
        self.package: Package = convert.package_from_proto(manifest)
        self.values = {item.name: item.default for item in manifest.hyperparameters}
        data = MODELS / "digits" / "data"
        self.entry: dict[str, Any] = json.loads((data / "dataset.json").read_text())[0]
        self.chunk = data / "train" / self.entry["fileName"]
        self.base = scratch / "base.bin"
        self.runner = BackendRunner(
            pools[0], scratch, scratch / "compiled", DeviceLimits(), gpu=pools[1], settings=DeviceSettings
        )

    def assignment(self, kind: Kind, epochs: int) -> tuple[Assignment, Inputs]:
        """An assignment with its files."""
        own = (
            tuple(self.values[name] for name in self.package.gpu.hyperparameters) if self.package.gpu else ()
        )
        config = Config(11, int(self.values["batchSize"]), self.values["learningRate"], epochs, own)
        held_out = self.folder / "validation.bin"
        base = None if kind is Kind.INITIALIZE else blob(self.base)
        chunk = Chunk("c", blob(self.chunk), self.entry["exampleCount"])
        work = Assignment(
            "a-1",
            1,
            "j-1",
            1,
            kind,
            self.package,
            config,
            weights=Weights(base, 0, base.size, base.sha256) if base else None,
            chunks=(chunk,) if kind is Kind.TRAIN else (),
            held_out=HeldOut(blob(held_out), 0, EVALUATED) if kind is Kind.EVALUATE else None,
        )
        files = {Kind.TRAIN: (self.chunk,), Kind.EVALUATE: (held_out,), Kind.INITIALIZE: ()}[kind]
        return work, Inputs(
            self.folder / "model.wasm", self.base if base else None, files, self.folder / "shaders.zip"
        )

    async def run(self, kind: Kind, choice: Choice, epochs: int = 1) -> Result:
        """Runs an assignment."""
        work, inputs = self.assignment(kind, epochs)
        return await self.runner.run(work, inputs, choice, lambda report: None)

    async def initialize(self) -> None:
        """Makes the weights of round 0 the base of all that follows."""
        made = await self.run(Kind.INITIALIZE, CPU)
        await asyncio.to_thread(Path(made.path).replace, self.base)


def delta(result: Result) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The change of the weights."""
    return np.fromfile(result.path, "<f4").astype(np.float64)


@pytest.mark.parametrize(("name", "epochs"), [("digits", 4), ("digits-cnn", 1)])
async def test_gpu_and_cpu_agree(
    name: str,
    epochs: int,
    tmp_path: Path,
    adapter: Adapter,
    pools: tuple[WorkerPool, GpuPool],
    record_property: Callable[[str, object], None],
) -> None:
    """The same chunk, seed and order: updates within 1e-4 relative L2, metrics within 1e-4."""
    shipped = Shipped(name, tmp_path, pools)
    choice = choose_backend(shipped.package, DeviceSettings(Preference.GPU), (adapter,))
    assert choice.backend is Backend.GPU_WGPU
    await shipped.initialize()

    for kind in (Kind.TRAIN, Kind.EVALUATE):
        on_cpu = await shipped.run(kind, CPU, epochs)
        on_gpu = await shipped.run(kind, choice, epochs)

        assert (on_cpu.backend, on_gpu.backend) == (Backend.CPU_WASM, Backend.GPU_WGPU)
        assert on_gpu.units == on_cpu.units
        for found, expected in zip(on_gpu.metrics, on_cpu.metrics, strict=True):
            assert (found.name, found.count) == (expected.name, expected.count)
            assert found.total == pytest.approx(expected.total, rel=1e-4)
        if kind is Kind.TRAIN:
            expected_delta = delta(on_cpu)
            distance = np.linalg.norm(delta(on_gpu) - expected_delta) / np.linalg.norm(expected_delta)
            record_property(f"{name}: relative L2 distance of the updates", float(distance))
            assert distance < 1e-4
