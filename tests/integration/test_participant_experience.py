"""Experience assignments: played by one worker or by several, updated once."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from covey_kit.errors import Reason
from covey_participant.domain.backend import Choice
from covey_participant.domain.execution import Stage
from covey_participant.domain.failure import WorkFailure
from covey_participant.domain.ports import Inputs, RunnerReport
from covey_participant.domain.values import (
    Assignment,
    Backend,
    Blob,
    Config,
    Kind,
    Package,
    UnitRange,
    Weights,
)
from covey_participant.runtime.cpu import CpuRunner, DeviceLimits, split_play
from covey_participant.runtime.pool import WorkerPool
from covey_participant.runtime.protocol import Job, Task
from support.wat_packages import adder_train, wasm
from support.worker_jobs import BASE, Bench

CPU = Choice(Backend.CPU_WASM, None, "")
FIRST, UNITS, SEED = 10, 7, 3


async def trained(
    folder: Path, workers: int, variant: str = "player"
) -> tuple[bytes, int, list[RunnerReport], list[str]]:
    """Returns (delta, units, reports, files left) of an experience assignment done by so many workers."""
    bench = Bench(folder)
    await asyncio.to_thread(bench.prepare)
    (folder / "base").write_bytes(BASE.tobytes())
    (folder / "model.wasm").write_bytes(wasm(variant))
    (folder / "scratch").mkdir()
    module = Blob("a" * 64, 1)
    package = Package(
        "player", "1", module, 8, ("total", "absent"), dataset_inputs=False, experience=True, max_workers=4
    )
    assignment = Assignment(
        *("r1.a0", 1, "job", 1, Kind.TRAIN, package, Config(99, 4, 0.5, 2)),
        weights=Weights(module, 0, BASE.nbytes, "b" * 64),
        unit_range=UnitRange(FIRST, UNITS, SEED),
    )
    reports: list[RunnerReport] = []
    pool = WorkerPool(4)
    runner = CpuRunner(pool, folder / "scratch", folder / "compiled", DeviceLimits(), lambda: workers)
    try:
        result = await runner.run(
            assignment, Inputs(folder / "model.wasm", folder / "base", ()), CPU, reports.append
        )
        delta = await asyncio.to_thread(Path(result.path).read_bytes)
        await runner.discard(result)
    finally:
        await pool.close()
    left = [path.name for path in (folder / "scratch").iterdir()]
    return delta, result.units, reports, left


@pytest.mark.may_block
async def test_it_doesnt_matter_how_many_workers_played(tmp_path: Path) -> None:
    """One and three workers give the same bytes: units are seeded by the sequence and their number."""
    alone = await trained(tmp_path / "one", 1)
    shared = await trained(tmp_path / "three", 3)

    played = [float(SEED + FIRST + n) for n in range(UNITS)]
    delta, _ = adder_train(BASE, played, local_epochs=2)
    assert alone[0] == shared[0] == delta.tobytes()
    assert alone[1] == shared[1] == UNITS
    assert Stage.PLAYING in {report.stage for report in alone[2]}
    assert max(report.workers for report in shared[2]) == 3
    assert shared[2][-1].workers == 1
    assert alone[3] == shared[3] == []


@pytest.mark.may_block
async def test_a_failure_of_one_worker_ends_the_play_of_all(tmp_path: Path) -> None:
    """The module's own error comes through, and nothing is left behind."""
    with pytest.raises(WorkFailure) as caught:
        await trained(tmp_path / "device", 3, "status-step")

    assert caught.value.reason is Reason.MODULE_EXPORT_MISSING
    assert list((tmp_path / "device" / "scratch").iterdir()) == []


@pytest.mark.parametrize("units", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("workers", [0, 1, 3, 64])
def test_parts_adjoin_and_cover_all_units(tmp_path: Path, units: int, workers: int) -> None:
    """In unit order, none twice, none empty unless there is nothing."""
    job = Job(Task.TRAIN, Bench(tmp_path).module("player"), first_unit=5, units=units, output="out")

    parts = split_play(job, workers)

    numbers = [n for part in parts for n in range(part.first_unit, part.first_unit + (part.units or 0))]
    assert numbers == list(range(5, 5 + units))
    assert len(parts) == max(1, min(units, workers))
    assert len({part.output for part in parts} | {job.output}) == len(parts) + 1
    assert np.all([part.task is Task.PLAY for part in parts])
