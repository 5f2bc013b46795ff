"""A package trains on the GPU worker and comes to what NumPy comes to in f64."""

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from covey_participant.domain.values import Adapter
from covey_participant.runtime.gpu.supervisor import GpuPool
from covey_participant.runtime.protocol import Progress, Step, Task
from covey_participant.runtime.supervisor import TimeLimits
from support.gpu_device import require_adapter
from support.gpu_module import chunk, gpu_job
from support.gpu_plans import BATCH, F32, INPUTS, linear_plan, minibatches, reference

LIMITS = TimeLimits(call=20.0, compile=60.0)

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    """The adapter of this machine."""
    return require_adapter()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[GpuPool]:
    """One pool for all tests."""
    made = GpuPool()
    yield made
    await made.close()


def base_weights(seed: int = 0) -> F32:
    """Random base weights."""
    return np.random.default_rng(seed).normal(size=INPUTS + 1).astype(np.float32)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """The relative L2 distance."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


async def test_a_hundred_steps_agree_with_numpy(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """After 100 SGD steps the update is within 1e-4 relative L2 of the same in f64, the loss within 1e-5."""
    batches, base = minibatches(100, seed=1, last_units=5), base_weights()
    job = gpu_job(tmp_path, (adapter.name, adapter.api), chunk(batches), base)
    seen: list[Progress] = []

    outcome = await pool.run(job, LIMITS, seen.append)

    content = (tmp_path / "delta.bin").read_bytes()
    expected, loss = reference(batches, base)
    assert hashlib.sha256(content).hexdigest() == outcome.sha256
    assert relative(np.frombuffer(content, "<f4"), expected - base) < 1e-4
    assert outcome.units == outcome.work_units == 99 * BATCH + 5
    assert outcome.metrics[0][0] == pytest.approx(loss, rel=1e-5)
    assert outcome.metrics[0][1] == outcome.units
    assert outcome.compute_seconds > 0
    assert {progress.step for progress in seen} >= {Step.COMPILE, Step.LOAD, Step.WORK}


async def test_the_same_job_gives_the_same_bytes(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """On one device a job is repeatable to the bit, whatever ran on the worker in between."""
    batches = minibatches(40, seed=2)
    results, started = [], pool.started
    for seed in (0, 7, 0):
        job = gpu_job(tmp_path, (adapter.name, adapter.api), chunk(batches), base_weights(seed))
        results.append((await pool.run(job, LIMITS)).sha256)

    assert results[0] == results[2] != results[1]
    assert pool.started <= started + 1


async def test_epochs_go_through_the_units_again(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """Three local epochs are three passes over the same minibatches; units count once, work three times."""
    batches, base = minibatches(10, seed=3, last_units=3), base_weights()
    job = gpu_job(tmp_path, (adapter.name, adapter.api), chunk(batches), base, epochs=3)

    outcome = await pool.run(job, LIMITS)

    expected, loss = reference(batches * 3, base)
    found = np.fromfile(tmp_path / "delta.bin", "<f4")
    assert relative(found, expected - base) < 1e-4
    assert (outcome.units, outcome.work_units) == (9 * BATCH + 3, 3 * (9 * BATCH + 3))
    assert outcome.metrics[0][0] == pytest.approx(loss, rel=1e-5)


async def test_experience_is_played_by_the_module_and_learnt_by_the_plan(
    tmp_path: Path, adapter: Adapter, pool: GpuPool
) -> None:
    """Hybrid: PLAY runs with the base weights on the CPU, UPDATE over what it recorded on the GPU."""
    base = base_weights()
    plan = linear_plan()
    plan["update"], plan["train"], plan["evaluate"] = plan["train"], [], []
    job = gpu_job(
        tmp_path,
        (adapter.name, adapter.api),
        b"",
        base,
        variant="experience",
        plan=plan,
        experience=(3, 40),
        epochs=2,
    )
    seen: list[Progress] = []

    outcome = await pool.run(job, LIMITS, seen.append)

    played = np.arange(3, 43, dtype=np.float32)
    x = ((played[:, None] + np.arange(INPUTS, dtype=np.float32)) / 64).astype(np.float32)
    t = (base[0] * played).astype(np.float32)
    batches = [(x[i : i + BATCH], t[i : i + BATCH]) for i in range(0, 40, BATCH)] * 2
    expected, loss = reference(batches, base)
    found = np.fromfile(tmp_path / "delta.bin", "<f4")
    assert relative(found, expected - base) < 1e-4
    assert (outcome.units, outcome.metrics[0][1]) == (40, 80.0)
    assert outcome.metrics[0][0] == pytest.approx(loss, rel=1e-5)
    assert any(progress.playing for progress in seen)


async def test_an_evaluation_changes_nothing(tmp_path: Path, adapter: Adapter, pool: GpuPool) -> None:
    """Evaluating measures the loss of the base weights on exactly the units asked for."""
    batches, base = minibatches(8, seed=4), base_weights()
    job = gpu_job(tmp_path, (adapter.name, adapter.api), chunk(batches), base, task=Task.EVALUATE)

    outcome = await pool.run(job, LIMITS)

    w = base.astype(np.float64)
    expected = sum(float(np.sum((x.astype(np.float64) @ w[:-1] + w[-1] - t) ** 2)) for x, t in batches)
    assert outcome.metrics[0][0] == pytest.approx(expected, rel=1e-5)
    assert outcome.metrics[0][1] == 8 * BATCH
    assert not (tmp_path / "delta.bin").exists()


async def test_an_assignment_without_units_changes_nothing(
    tmp_path: Path, adapter: Adapter, pool: GpuPool
) -> None:
    """An empty chunk gives a delta of zeros and metrics over nothing."""
    job = gpu_job(tmp_path, (adapter.name, adapter.api), b"", base_weights())

    outcome = await pool.run(job, LIMITS)

    assert outcome.units == 0
    assert outcome.metrics == [(0.0, 0.0)]
    assert not np.fromfile(tmp_path / "delta.bin", "<f4").any()


async def test_a_job_without_a_gpu_half_runs_as_on_the_cpu(
    tmp_path: Path, adapter: Adapter, pool: GpuPool
) -> None:
    """The GPU worker counts a chunk's units with the module alone."""
    job = gpu_job(
        tmp_path, (adapter.name, adapter.api), chunk(minibatches(3, seed=5)), base_weights(), task=Task.COUNT
    )

    assert (await pool.run(job, LIMITS)).units == 3 * BATCH
