"""The participant's runner takes assignments to the GPU, and says what really ran."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from covey_kit.errors import Reason
from covey_participant.domain.backend import Choice, Fallback, choose_backend
from covey_participant.domain.execution import Stage
from covey_participant.domain.ports import Inputs, RunnerReport
from covey_participant.domain.values import (
    Adapter,
    Assignment,
    Backend,
    Blob,
    Chunk,
    Config,
    DeviceSettings,
    GpuNeeds,
    Kind,
    Package,
    Preference,
    Weights,
)
from covey_participant.runtime.cpu import DeviceLimits
from covey_participant.runtime.gpu.failure import GpuFailure
from covey_participant.runtime.gpu.runner import BackendRunner
from covey_participant.runtime.gpu.supervisor import GpuPool
from covey_participant.runtime.pool import WorkerPool
from support.gpu_device import require_adapter
from support.gpu_module import chunk, linear_module
from support.gpu_plans import BATCH, INPUTS, RATE, archive_bytes, linear_plan, minibatches, reference

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BATCHES = minibatches(30, seed=6, last_units=7)
UNITS = 29 * BATCH + 7
BASE = np.random.default_rng(6).normal(size=INPUTS + 1).astype("<f4")


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


def blob(path: Path, content: bytes) -> Blob:
    """Writes a file and returns it as a blob."""
    path.write_bytes(content)
    return Blob(hashlib.sha256(content).hexdigest(), len(content))


def assignment(folder: Path, kind: Kind) -> tuple[Assignment, Inputs]:
    """An assignment of the linear model with its files."""
    package = Package(
        name="linear",
        version="1",
        module=blob(folder / "module.wasm", linear_module()),
        weights=INPUTS + 1,
        metrics=("loss",),
        evaluation=True,
        gpu=GpuNeeds(parameters=(("weight", INPUTS), ("bias", 1))),
        shader_archive=blob(folder / "shaders.zip", archive_bytes(linear_plan())),
    )
    data = blob(folder / "chunk.bin", chunk(BATCHES))
    base = blob(folder / "base.bin", BASE.tobytes())
    work = Assignment(
        assignment_id="a-1",
        attempt=1,
        job_id="j-1",
        round=1,
        kind=kind,
        package=package,
        config=Config(1, BATCH, RATE, 1),
        weights=Weights(base, 0, base.size, base.sha256),
        chunks=(Chunk("c", data, UNITS),) if kind is Kind.TRAIN else (),
    )
    inputs = Inputs(
        folder / "module.wasm", folder / "base.bin", (folder / "chunk.bin",), folder / "shaders.zip"
    )
    return work, inputs


def runner(folder: Path, pools: tuple[WorkerPool, GpuPool], budget_mib: int | None = None) -> BackendRunner:
    """A runner with this memory budget."""
    return BackendRunner(
        pools[0],
        folder,
        folder / "compiled",
        DeviceLimits(),
        gpu=pools[1],
        settings=lambda: DeviceSettings(gpu_memory_budget_mib=budget_mib),
    )


def deltas(folder: Path) -> list[Path]:
    """The files of results."""
    return list(folder.glob("*.delta"))


async def test_training_runs_where_it_was_chosen(
    tmp_path: Path, adapter: Adapter, pools: tuple[WorkerPool, GpuPool]
) -> None:
    """The result is the GPU's, and says so; the stages on the way are reported."""
    work, inputs = assignment(tmp_path, Kind.TRAIN)
    choice = choose_backend(work.package, DeviceSettings(Preference.GPU), (adapter,))
    reports: list[RunnerReport] = []

    result = await runner(tmp_path, pools).run(work, inputs, choice, reports.append)

    expected, _ = reference(BATCHES, BASE)
    assert choice.backend is result.backend is Backend.GPU_WGPU
    assert (result.units, result.metrics[0].name) == (UNITS, "loss")
    delta = np.fromfile(result.path, "<f4")
    assert np.linalg.norm(delta - (expected - BASE)) < 1e-4 * np.linalg.norm(expected - BASE)
    assert {Stage.COMPILING, Stage.LOADING, Stage.TRAINING} <= {report.stage for report in reports}


async def test_evaluation_runs_where_it_was_chosen(
    tmp_path: Path, adapter: Adapter, pools: tuple[WorkerPool, GpuPool]
) -> None:
    """An evaluation on the GPU has metrics and no file."""
    work, inputs = assignment(tmp_path, Kind.EVALUATE)
    choice = choose_backend(work.package, DeviceSettings(Preference.GPU), (adapter,))

    result = await runner(tmp_path, pools).run(work, inputs, choice, lambda report: None)

    assert (result.backend, result.units, result.path) == (Backend.GPU_WGPU, UNITS, "")
    assert result.metrics[0].total is not None
    assert result.metrics[0].count == UNITS


async def test_a_budget_that_is_too_small_is_the_reason(
    tmp_path: Path, adapter: Adapter, pools: tuple[WorkerPool, GpuPool]
) -> None:
    """A plan over the budget in force fails with BUDGET, and leaves no file behind."""
    work, inputs = assignment(tmp_path, Kind.TRAIN)
    choice = choose_backend(work.package, DeviceSettings(Preference.GPU), (adapter,))

    with pytest.raises(GpuFailure) as caught:
        await runner(tmp_path, pools, 0).run(work, inputs, choice, lambda report: None)

    assert (caught.value.reason, caught.value.fallback) == (Reason.LIMIT_EXCEEDED, Fallback.BUDGET)
    assert not deltas(tmp_path)


async def test_the_cpu_is_used_when_it_was_chosen(
    tmp_path: Path, adapter: Adapter, pools: tuple[WorkerPool, GpuPool]
) -> None:
    """The linear module has no CPU training of its own, and that is what is heard."""
    work, inputs = assignment(tmp_path, Kind.TRAIN)
    cpu = Choice(Backend.CPU_WASM, Fallback.PREFERENCE, "")

    with pytest.raises(Exception, match="covey_begin") as caught:
        await runner(tmp_path, pools).run(work, inputs, cpu, lambda report: None)

    assert not isinstance(caught.value, GpuFailure)
