"""Reinforcement learning through real processes: packages that make their own work, whoever takes part."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.mesh import Mesh, running
from support.packages import MODELS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SMALL = ("--set", "assignmentsPerRound=4", "--set", "experience.unitsPerAssignment=3", "--set", "seed=5")


async def run(mesh: Mesh, *arguments: str) -> Any:
    """Runs a `covey` command that must succeed, and returns its JSON."""
    code, out, err = await mesh.covey(*arguments, "--json", timeout=120)
    assert code == 0, err
    lines = out.splitlines()
    return json.loads(lines[-1]) if lines else None


async def complete(mesh: Mesh, job_id: str) -> list[dict[str, Any]]:
    """Starts a job once everybody accepted, waits for its end, and returns its rounds."""
    count = len(mesh.participants)
    async with mesh.client() as client:
        await client.participants.invite(job_id, all_connected=True)
        await client.participants.accepted(job_id, count, timeout=60)
    await run(mesh, "job", "start", job_id)
    await run(mesh, "job", "watch", job_id)
    found: list[dict[str, Any]] = await run(mesh, "job", "rounds", job_id)
    return found


def digests(rounds: list[dict[str, Any]]) -> list[str]:
    """The checkpoints' digests, round by round."""
    return [one["checkpoint"]["sha256"] for one in rounds]


async def created(mesh: Mesh, package: str, *arguments: str) -> str:
    """Creates a job of one of the repository's packages; returns its id."""
    job = await run(mesh, "job", "create", str(MODELS / package), *SMALL, *arguments)
    return str(job["jobId"])


async def test_cartpole_makes_the_same_bytes_on_one_device_and_on_three(tmp_path: Path) -> None:
    """Four rounds at once on three devices are two and two on one, continued with `covey job continue`."""
    async with running(tmp_path / "three", 3) as mesh:
        job_id = await created(mesh, "cartpole", "--target-round", "4", "--set", "validationInterval=2")
        rounds = await complete(mesh, job_id)
        whole = digests(rounds)
        shown = await run(mesh, "job", "show", job_id)
    assert len(set(whole)) == 5
    assert ["validationMetrics" in one for one in rounds] == [False, False, True, False, True]
    evaluated = {m["name"]: m for m in rounds[-1]["validationMetrics"]}
    assert evaluated["return"]["count"] == 100
    assert shown["progress"]["unitsDone"] == shown["progress"]["unitsWanted"]
    assert shown["unit"] == "episode"

    async with running(tmp_path / "one", 1) as mesh:
        first = await created(mesh, "cartpole", "--target-round", "2")
        assert digests(await complete(mesh, first)) == whole[:3]
        second = await run(mesh, "job", "continue", first, "--target", "4")
        assert second["lineage"]["sourceJobId"] == first
        assert digests(await complete(mesh, second["jobId"])) == whole[2:]
        code, _, err = await mesh.covey("job", "continue", first, "--target", "2")
        assert code != 0
        assert "expected a round above the checkpoint's, which is 2; found 2" in err
