"""`covey demo` and law 3: the same bytes, whoever takes part and whatever dies on the way."""

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from covey.client import Client
from covey.packages import load, load_dataset
from covey.v1 import job_pb2
from support.eventually import eventually
from support.mesh import SHAPES, Mesh, Shape, covey, processes_with, running
from support.packages import DIGITS

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(400)]

ROUNDS = 4
"""Enough for every kind of fault to fall into the middle of the work."""


async def demo(folder: Path, *arguments: str, participants: int = 2, rounds: int = ROUNDS) -> dict[str, Any]:
    """Runs a demo to its end and returns its JSON."""
    code, out, err = await covey(
        *("demo", "--participants", str(participants), "--rounds", str(rounds)),
        *("--folder", str(folder), "--json", *arguments),
        timeout=300,
    )
    assert code == 0, err
    assert len(out.splitlines()) == 1
    assert processes_with(str(folder)) == []
    result: dict[str, Any] = json.loads(out)
    return result


def sha256(path: Path) -> str:
    """Returns a file's digest."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def names_in(folder: Path) -> list[str]:
    """Returns what lies in a folder."""
    return sorted(path.name for path in folder.iterdir())


@functools.cache
def _expected() -> dict[str, str]:
    """Digests that the tests of this session found for `ROUNDS` rounds; the first one sets them."""
    return {}


def same_bytes(result: dict[str, Any]) -> None:
    """Checks that every run of this session ended with the same checkpoint."""
    found = _expected().setdefault("checkpoint", result["checkpoint_sha256"])
    assert result["checkpoint_sha256"] == found
    assert result["weights_sha256"] == _expected().setdefault("weights", result["weights_sha256"])


async def test_the_demo_reads_digits(tmp_path: Path) -> None:
    """With its own defaults it reaches a held-out accuracy of 96 % and exports what it says."""
    code, out, err = await covey("demo", "--json", "--folder", str(tmp_path), timeout=350)

    assert code == 0, err
    result = json.loads(out)
    assert sha256(Path(result["checkpoint_path"])) == result["checkpoint_sha256"]
    assert result["accuracy"] >= 0.96
    assert [row["round"] for row in result["history"]] == list(range(1, result["rounds"] + 1))
    assert all(row["held_out_accuracy"] is not None for row in result["history"])
    assert processes_with(str(tmp_path)) == []


@pytest.mark.parametrize("participants", [1, 2, 5])
async def test_the_number_of_participants_changes_no_byte(tmp_path: Path, participants: int) -> None:
    """One, two or five devices make the same checkpoint."""
    result = await demo(tmp_path, participants=participants)

    assert (result["participants"], result["rounds"]) == (participants, ROUNDS)
    assert result["accuracy"] >= 0.9
    same_bytes(result)


async def test_another_seed_makes_another_model(tmp_path: Path) -> None:
    """Else the equality of the other runs would show nothing."""
    result = await demo(tmp_path, "--seed", "1", rounds=1)

    assert result["history"][0]["units"] > 0
    assert result["checkpoint_sha256"] != _expected().get("checkpoint")


@pytest.mark.parametrize("victim", ["participant", "coordinator"])
async def test_a_demo_whose_process_is_killed_ends_with_the_same_bytes(tmp_path: Path, victim: str) -> None:
    """A participant, or the coordinator with storage, is killed in mid-training: it is started again."""
    pid_file = tmp_path / "pids.json"

    async def kill_later() -> str:
        await eventually(lambda: _round_begun(tmp_path / "mesh"), 120, "a round is done", 0.05)
        pids = json.loads(pid_file.read_text())
        pid = pids["coordinator"] if victim == "coordinator" else next(iter(pids["participants"].values()))
        os.kill(pid, signal.SIGKILL)
        return str(pid)

    killer = asyncio.create_task(kill_later())
    result = await demo(tmp_path / "mesh", "--pid-file", str(pid_file))

    assert await killer
    same_bytes(result)


def _round_begun(folder: Path) -> bool:
    """Says whether the first trained round is in storage."""
    large = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 400_000]
    return len([p for p in large if "storage" in p.parts]) >= 3  # the held-out file, round 0, round 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_interrupted_demo_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C or SIGTERM: one line, the conventional exit code, no process, no temporary folder."""
    environment = dict(os.environ) | {"TMPDIR": str(tmp_path)}
    pid_file = tmp_path / "pids.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "covey", "demo", "--pid-file", str(pid_file)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    try:
        await eventually(lambda: len(processes_with(str(tmp_path))) >= 5, 60, "all processes run", 0.1)
        os.killpg(process.pid, number)
        _, err = await asyncio.wait_for(process.communicate(), 30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    assert b"Traceback" not in err
    await eventually(lambda: processes_with(str(tmp_path)) == [], 10, "no process is left", 0.1)
    assert names_in(tmp_path) == ["pids.json"]


async def test_children_of_a_killed_demo_end_by_themselves(tmp_path: Path) -> None:
    """SIGKILL gives the demo no chance to clean up: its processes notice and end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "covey", "demo", "--folder", str(tmp_path)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        await eventually(lambda: len(processes_with(str(tmp_path))) >= 5, 60, "all processes run", 0.1)
    finally:
        process.kill()
        await process.wait()

    await eventually(lambda: processes_with(str(tmp_path)) == [], 20, "no process is left", 0.1)


@contextlib.asynccontextmanager
async def training(folder: Path, participants: int, shape: Shape) -> AsyncIterator[tuple[Mesh, Client, str]]:
    """A mesh that trains what the demo trains: yields it with a client and the running job's id."""
    async with running(folder, participants, shape) as mesh, mesh.client() as client:
        package = await asyncio.to_thread(load, DIGITS)
        dataset = await asyncio.to_thread(load_dataset, DIGITS / "data" / "dataset.json", package)
        settings = job_pb2.JobSettings(target_round=ROUNDS, seed=0, validation_interval=1)
        job = (await client.jobs.create(package, dataset, settings)).job_id
        await client.participants.invite(job, all_connected=True)
        await client.participants.accepted(job, participants)
        await client.jobs.start(job)
        yield mesh, client, job


async def _in_round(client: Client, job: str, number: int) -> bool:
    """Says whether the round runs and somebody works on it."""
    now = await client.jobs.get(job)
    assignments = now.current_round.assignments if now.current_round.round == number else ()
    return any(one.status == job_pb2.ASSIGNMENT_STATUS_RUNNING for one in assignments)


async def _same_end(client: Client, job: str, folder: Path) -> None:
    """Follows the job to its end and compares what it made with every other run."""
    states = [state async for state in client.jobs.watch(job, patience=60)]
    assert states[-1].state == job_pb2.JOB_STATE_COMPLETED, states[-1]
    record = await client.checkpoints.export(job, folder / "end.safetensors")
    same_bytes(
        {"checkpoint_sha256": record.blob.sha256, "weights_sha256": record.header.weights_sha256},
    )


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_participant_killed_in_mid_round_changes_no_byte(tmp_path: Path, shape: Shape) -> None:
    """Its assignment goes to the other, which ends alone with the same checkpoint."""
    async with training(tmp_path, 2, shape) as (mesh, client, job):
        await eventually(lambda: _in_round(client, job, 2), 60, "round 2 is worked on", 0.01)
        await mesh.participants["p1"].kill()

        await _same_end(client, job, tmp_path)


@pytest.mark.parametrize("victim", ["coordinator", "storage"])
async def test_a_server_killed_and_started_again_changes_no_byte(tmp_path: Path, victim: str) -> None:
    """Killed in the middle of a round, started again a moment later: training goes on where it was."""
    async with training(tmp_path, 2, "three processes") as (mesh, client, job):
        await eventually(lambda: _in_round(client, job, 2), 60, "round 2 is worked on", 0.01)
        await mesh.servers[victim].kill()
        await mesh.start_server(mesh.servers[victim])

        await _same_end(client, job, tmp_path)


async def test_the_one_process_killed_and_started_again_changes_no_byte(tmp_path: Path) -> None:
    """The same with coordinator and storage in one process, twice in a row."""
    async with training(tmp_path, 2, "one process") as (mesh, client, job):
        for number in (1, 3):
            begun = functools.partial(_in_round, client, job, number)
            await eventually(begun, 90, f"round {number} is worked on", 0.01)
            await mesh.coordinator.kill()
            await mesh.start_server(mesh.coordinator)

            async def answers() -> bool:
                with contextlib.suppress(Exception):
                    await client.jobs.get(job)
                    return True
                return False

            await eventually(answers, 30, "it answers again", 0.05)

        await _same_end(client, job, tmp_path)
