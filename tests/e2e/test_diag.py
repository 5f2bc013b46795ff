"""`covey diag` against a mesh of real processes, in both shapes of deployment."""

import json
import re
from pathlib import Path

import pytest

from support.eventually import eventually
from support.mesh import SHAPES, Mesh, Shape, running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


async def listed(mesh: Mesh) -> list[dict[str, object]]:
    """Returns what `covey diag ls --json` prints."""
    code, out, err = await mesh.covey("diag", "ls", "--json")
    assert code == 0, err
    found: list[dict[str, object]] = json.loads(out)
    return found


@pytest.mark.parametrize("shape", SHAPES)
async def test_devices_are_shown_and_one_that_is_killed_is_gone_at_once(tmp_path: Path, shape: Shape) -> None:
    """An idle device is current, and what isn't known of it is absent; after SIGKILL it is disconnected."""
    async with running(tmp_path, 2, shape) as mesh:

        async def both() -> bool:
            return len(await listed(mesh)) == 2

        await eventually(both, timeout=30, message="both devices are shown")
        found = await listed(mesh)
        assert all("staleness" not in one for one in found)
        for one in found:
            snapshot = one["snapshot"]
            assert isinstance(snapshot, dict)
            assert snapshot["stage"] == "STAGE_IDLE"
            assert not {"jobId", "unitsPerSecond", "units", "workers", "batchSize"} & set(snapshot)

        code, table, _ = await mesh.covey("diag", "ls")
        assert code == 0
        assert "idle" in table
        assert "—" in table
        name = found[0]["snapshot"]["participantId"]  # type: ignore[index]  # checked above
        code, facts, _ = await mesh.covey("diag", "show", str(name))
        assert code == 0
        assert re.search(r"^units per second +—$", facts, re.MULTILINE)

        await next(iter(mesh.participants.values())).kill()

        async def gone() -> bool:
            return [one.get("staleness") for one in await listed(mesh)].count("STALENESS_DISCONNECTED") == 1

        await eventually(gone, timeout=10, message="the killed one is shown as disconnected")


async def test_an_unknown_device_is_an_error_that_says_where_to_look(tmp_path: Path) -> None:
    """Exit code 1, and the command that lists devices."""
    async with Mesh(tmp_path) as mesh:
        code, _, err = await mesh.covey("diag", "show", "nobody")

    assert code == 1
    assert "covey diag ls" in err
