"""A real participant at a real coordinator: from joining to the last checkpoint."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from covey.v1 import errors_pb2, job_pb2
from support.coordinator import Mesh, mesh
from support.device import create_job, device
from support.eventually import eventually
from support.wat_packages import WatPackage, adder_initialize, adder_train, write_package

UNITS = 6


async def written(folder: Path, variant: str = "adder", **changes: Any) -> WatPackage:
    """A package in a folder."""
    return await asyncio.to_thread(write_package, folder, variant, units=UNITS, **changes)


async def trained(running: Mesh, package: WatPackage, folder: Path, **settings: Any) -> job_pb2.Job:
    """Trains a job of the package with one participant, and returns how it ended."""
    job_id = await create_job(running, package, **settings)
    async with device(running.address, folder) as app:
        await eventually(lambda: app.control.connected)
        await running.begin(job_id, 1)
        return await running.ended(job_id)


def digest(weights: "np.ndarray[Any, np.dtype[np.float32]]") -> str:
    """SHA-256 of weights as they lie in a checkpoint."""
    return hashlib.sha256(weights.astype("<f4").tobytes()).hexdigest()


async def test_a_participant_trains_a_job_to_its_end(tmp_path: Path) -> None:
    """Every round's weights are those that NumPy gets, to the bit; validations come with the rounds."""
    package = await written(tmp_path / "package", validation_units=5, validationExampleCount=5)
    async with mesh(tmp_path / "mesh") as running:
        job = await trained(running, package, tmp_path / "device", epochs=2, validation_interval=1)
        rounds = await running.rounds(job.job_id)

    # The job's seed makes the initial weights, of which the adder can make 256.
    starts = {digest(adder_initialize(8, seed)): adder_initialize(8, seed) for seed in range(256)}
    weights = starts[rounds[0].weights_sha256]
    expected = [digest(weights)]
    for _ in range(2):
        deltas = [adder_train(weights, [k + 1 + 0.25 * i for i in range(UNITS)])[0] for k in range(2)]
        weights = (weights + (deltas[0] + deltas[1]) / 2).astype(np.float32)
        expected.append(digest(weights))

    assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure
    assert [r.weights_sha256 for r in rounds] == expected
    assert [bool(r.validation_metrics) for r in rounds] == [False, True, True]
    assert [(m.name, m.HasField("sum"), m.count) for m in rounds[1].metrics] == [
        ("total", True, 2 * UNITS),
        ("absent", False, 0),
    ]


async def test_a_package_that_fails_everywhere_fails_its_job(tmp_path: Path) -> None:
    """The job ends with the module's own error, quoted."""
    package = await written(tmp_path / "package", "status-step")
    async with mesh(tmp_path / "mesh") as running:
        job = await trained(running, package, tmp_path / "device")

    assert job.state == job_pb2.JOB_STATE_FAILED
    assert job.failure.reason == errors_pb2.ERROR_REASON_MODULE_STATUS
    assert "äther is down" in job.failure.message


async def test_the_number_of_participants_changes_no_bit(tmp_path: Path) -> None:
    """Three participants make the same checkpoints as one."""
    package = await written(tmp_path / "package", chunks=6)
    async with mesh(tmp_path / "mesh") as running:
        alone = await trained(running, package, tmp_path / "alone", epochs=2)
        job_id = await create_job(running, package, epochs=2)
        async with (
            device(running.address, tmp_path / "a") as a,
            device(running.address, tmp_path / "b") as b,
            device(running.address, tmp_path / "c") as c,
        ):
            await eventually(lambda: a.control.connected and b.control.connected and c.control.connected)
            await running.begin(job_id, 3)
            job = await running.ended(job_id)
        rounds = await running.rounds(job_id), await running.rounds(alone.job_id)

    assert job.state == alone.state == job_pb2.JOB_STATE_COMPLETED
    assert [r.checkpoint.sha256 for r in rounds[0]] == [r.checkpoint.sha256 for r in rounds[1]]


async def test_a_coordinator_that_comes_back_finds_its_participant(tmp_path: Path) -> None:
    """The participant joins again by itself, and the job goes on from where it was."""
    package = await written(tmp_path / "package", chunks=8)
    async with mesh(tmp_path / "mesh") as running:
        job_id = await create_job(running, package, epochs=3)
        async with device(running.address, tmp_path / "device") as app:
            await eventually(lambda: app.control.connected)
            await running.begin(job_id, 1)
            await eventually(lambda: running.rounds(job_id))
            await running.stop()
            await eventually(lambda: not app.control.connected)
            assert app.control.disconnected_reason
            await running.start()
            job = await running.ended(job_id)

    assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure
    assert job.progress.rounds_done == 12


async def test_a_job_that_is_stopped_frees_its_participant_within_a_second(tmp_path: Path) -> None:
    """Work that would never end is cancelled when its job is stopped, and the worker is used again."""
    from covey.v1 import coordinator_service_pb2 as pb

    package = await written(tmp_path / "package", "never-done")
    async with mesh(tmp_path / "mesh") as running:
        job_id = await create_job(running, package)
        async with device(running.address, tmp_path / "device") as app:
            await eventually(lambda: app.control.connected)
            await running.begin(job_id, 1)
            await eventually(lambda: app.desk.execution and app.desk.execution.stage.value == "TRAINING")
            await running.call("StopJob", pb.StopJobRequest(job_id=job_id))

            await eventually(lambda: app.desk.execution is None, timeout=1.0)
            assert app.pool.busy == 0
