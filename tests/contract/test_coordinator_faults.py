"""What the coordinator does when something beside it breaks."""

import asyncio
import shutil
import sqlite3
import sys
from pathlib import Path

import pytest

from covey.v1 import coordinator_service_pb2, job_pb2
from covey_coordinator.app import CoordinatorApp, CoordinatorSettings
from covey_kit.errors import FailedPrecondition, Reason, Unavailable
from covey_kit.tokens import SigningKey
from support.coordinator import Mesh, job_request, mesh
from support.eventually import eventually
from support.scripted_participant import (
    Outcome,
    ScriptedParticipant,
    Weights,
    compute,
    participants,
)


async def finished(running: Mesh, job_id: str) -> list[str]:
    """Waits until a job is completed and returns the digests of its checkpoints."""
    job = await running.ended(job_id, 30)
    assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure
    return [r.checkpoint.sha256 for r in await running.rounds(job_id)]


async def test_storage_may_go_and_come_back(tmp_path: Path) -> None:
    """While storage is away a complete round waits for it, and says so; then it goes on as if nothing was."""
    hold = asyncio.Event()

    async def stall(_: ScriptedParticipant, assignment: object, base: Weights | None) -> Outcome:
        if getattr(assignment, "round", 0) == 1:
            await hold.wait()
        return compute(assignment, base)  # type: ignore[arg-type]  # an assignment

    async with mesh(tmp_path / "one") as running, participants(running.address, 1):
        job_id = await running.create((5, 6))
        await running.begin(job_id, 1)
        expected = await finished(running, job_id)

    async with (
        mesh(tmp_path / "two", together=False) as running,
        participants(running.address, 2, stall) as devices,
    ):
        job_id = await running.create((5, 6))
        await running.begin(job_id, 2)
        await eventually(lambda: sum(a.round == 1 for d in devices for a in d.in_hand) == 2)
        await asyncio.gather(*(d.base(d.in_hand[0]) for d in devices))
        await running.storage_host.stop(grace=0)
        hold.set()

        async def told() -> bool:
            job = await running.job(job_id)
            return any("round 1" in w.message and w.HasField("until") for w in job.waits) and (
                job.current_round.aggregating
            )

        await eventually(told)
        with pytest.raises(Unavailable) as caught:
            await running.call("CreateJob", job_request((5, 6)))
        assert caught.value.reason is Reason.STORAGE_UNAVAILABLE
        await running.start_storage()
        assert await finished(running, job_id) == expected


async def test_a_job_is_deleted_while_storage_is_away(tmp_path: Path) -> None:
    """The job is gone at once; what storage holds for it is released when storage is back."""
    async with mesh(tmp_path, together=False) as running:
        job_id = await running.create((5, 6))
        await running.storage_host.stop(grace=0)
        await running.call("DeleteJob", coordinator_service_pb2.DeleteJobRequest(job_id=job_id))
        await running.stop_coordinator()
        await running.start_storage()
        assert (await running.inventory()).unreferenced_count == 0
        await running.start_coordinator()

        async def released() -> bool:
            return (await running.inventory()).blob_count == 0

        await eventually(released)


async def test_a_lost_delta_is_done_again(tmp_path: Path) -> None:
    """An accepted delta that is damaged at the next start is computed again; the bytes stay the same."""
    running = Mesh(tmp_path)
    await running.start()

    async def stuck(_: ScriptedParticipant, assignment: object, base: Weights | None) -> Outcome | None:
        place = (getattr(assignment, "round", 0), getattr(assignment, "index", 0))
        return None if place == (1, 1) else compute(assignment, base)  # type: ignore[arg-type]  # an assignment

    async with participants(running.address, 1):
        job_id = await running.create((5, 6))
        await running.begin(job_id, 1)
        expected = await finished(running, job_id)
    async with participants(running.address, 1, stuck):
        job_id = await running.create((5, 6))
        await running.begin(job_id, 1)

        async def half() -> bool:
            opened = (await running.job(job_id)).current_round
            return opened.round == 1 and [a.status for a in opened.assignments] == [3, 2]

        await eventually(half)
    await running.stop()
    (delta,) = (tmp_path / "coordinator" / "deltas" / job_id / "r1").iterdir()
    delta.write_bytes(b"\0" * delta.stat().st_size)
    shutil.rmtree(tmp_path / "coordinator" / "checkpoints")  # the base comes from storage then
    await running.start()
    async with participants(running.address, 1) as (device,):
        assert await finished(running, job_id) == expected
        assert [a.index for a in device.assignments if a.round == 1] == [0, 1]
    await running.stop()


async def test_nothing_of_a_finished_job_stays_in_the_folder(tmp_path: Path) -> None:
    """Deltas and checkpoint files are gone when the job has ended: storage has what must last."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        job_id = await running.create((5, 6))
        await running.begin(job_id, 1)
        await finished(running, job_id)
        folder = tmp_path / "coordinator"
        await eventually(lambda: not list(folder.glob(f"*/{job_id}")))


async def test_a_folder_has_one_coordinator(tmp_path: Path) -> None:
    """A second process is refused with the folder's name and the first one's id, until the first ends."""
    settings = CoordinatorSettings(tmp_path)
    key = SigningKey.generate()
    first = await CoordinatorApp.open(settings, key)
    with pytest.raises(FailedPrecondition, match=f"{tmp_path} is in use by process"):
        await CoordinatorApp.open(settings, key)
    await first.close()
    await first.close()
    again = await CoordinatorApp.open(settings, key)
    await again.close()


async def test_another_schema_is_refused(tmp_path: Path) -> None:
    """A database of another version is left alone, and both versions are named."""
    settings = CoordinatorSettings(tmp_path)
    app = await CoordinatorApp.open(settings, SigningKey.generate())
    await app.close()
    with sqlite3.connect(tmp_path / "coordinator.db") as connection:
        connection.execute("UPDATE settings SET value = '99' WHERE name = 'schema_version'")
    connection.close()

    with pytest.raises(FailedPrecondition, match="schema version 99, this program reads 2"):
        await CoordinatorApp.open(settings, SigningKey.generate())


async def test_commits_outlast_a_loss_of_power(tmp_path: Path) -> None:
    """SQLite runs with a write-ahead log that is synced at each commit, on every connection."""
    app = await CoordinatorApp.open(CoordinatorSettings(tmp_path), SigningKey.generate())
    async with app._database._engine.connect() as connection:
        found = [
            (await connection.exec_driver_sql(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        ]
    await app.close()
    assert found == ["wal", 2, 1]


async def test_the_command_serves(tmp_path: Path) -> None:
    """The command says where it listens, leaves the owner's token, and ends with 0 on SIGTERM."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "covey_coordinator", "serve", "--listen", "127.0.0.1:0"),
        *("--folder", str(tmp_path), "--storage", "127.0.0.1:1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 30)).decode()
        assert line.startswith("coordinator is ready on 127.0.0.1:")
        for name in ("owner.token", "signing-key.pem"):
            assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    finally:
        process.terminate()
    assert await asyncio.wait_for(process.wait(), 20) == 0
