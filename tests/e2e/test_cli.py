"""The command against a mesh of real processes, as a person at a shell uses it."""

import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from covey.packages import load
from covey.v1 import job_pb2
from support.certificates import self_signed
from support.eventually import eventually
from support.mesh import SHAPES, Mesh, Shape, covey, processes_with, running
from support.packages import DIGITS, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

DATASET = DIGITS / "data" / "dataset.json"
HELP_SECONDS = 0.5


@pytest.fixture
def clean(tmp_path: Path) -> Mapping[str, str]:
    """An environment in which no coordinator is known."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("COVEY_")}
    return kept | {"COVEY_CONFIG_FOLDER": str(tmp_path / "config")}


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    """A mesh without participants."""
    async with Mesh(tmp_path) as made:
        yield made


async def value(mesh: Mesh, *arguments: str, timeout: float = 60.0) -> Any:
    """Runs a command with --json that must succeed, and returns what it printed."""
    code, out, err = await mesh.covey(*arguments, "--json", timeout=timeout)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_job_from_its_creation_to_a_prediction(tmp_path: Path, shape: Shape) -> None:
    """Create, invite, start, watch, validate, export, inspect, verify and predict, each through its command,
    in both shapes of deployment."""
    async with running(tmp_path, 2, shape) as mesh:
        job = await value(
            mesh,
            "job",
            "create",
            str(DIGITS),
            "--data",
            str(DATASET),
            "--target-round",
            "2",
            "--name",
            "first",
        )
        name = job["jobId"]
        assert (job["state"], job["displayName"]) == ("JOB_STATE_CREATED", "first")

        invited = await value(mesh, "invite", name, "--all", "--wait")
        states = [one["invitation"] for one in invited["participants"]]
        assert states == ["INVITATION_STATE_ACCEPTED"] * 2
        assert (await value(mesh, "job", "start", name))["state"] == "JOB_STATE_RUNNING"
        code, out, err = await mesh.covey("job", "watch", name, timeout=120)
        assert code == 0, err
        assert "completed, round 2 of 2" in out.splitlines()[-1]

        validated = await value(mesh, "job", "validate", name, "--round", "1", "--wait")
        assert 0.5 < validated["metrics"]["accuracy"] <= 1
        rounds = await value(mesh, "job", "rounds", name)
        assert [row.get("round", 0) for row in rounds] == [0, 1, 2]

        file = tmp_path / "out.safetensors"
        exported = await value(mesh, "checkpoint", "export", name, "--output", str(file))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert exported["checkpoint"]["blob"]["sha256"] == digest
        assert exported["checkpoint"]["round"] == 2
        inspected = await value(mesh, "checkpoint", "inspect", str(file))
        assert inspected["header"]["packageName"] == "digits"
        verified = await value(mesh, "checkpoint", "verify", str(file), "--package", str(DIGITS))
        assert (verified["valid"], verified["sha256"]) == (True, digest)
        assert (await value(mesh, "checkpoint", "verify", name))["sha256"] == digest
        predicted = await value(
            mesh, "predict", str(DIGITS), str(file), str(DIGITS / "samples" / "seven.pgm")
        )
        assert predicted["label"] == "7"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        damaged = tmp_path / "damaged.safetensors"
        damaged.write_bytes(content)
        code, _, err = await mesh.covey(
            "predict", str(DIGITS), str(damaged), str(DIGITS / "samples" / "seven.pgm")
        )
        assert code == 1
        assert "is damaged" in err
        assert sum(predicted["scores"].values()) == pytest.approx(1, abs=1e-4)


async def test_the_tables_for_people_show_the_same(tmp_path: Path) -> None:
    """Without --json each list is a table whose rows have the ids."""
    async with running(tmp_path, 2) as mesh:
        _, created, _ = await mesh.covey("job", "create", str(DIGITS), "--data", str(DATASET))
        job = created.strip()

        for arguments, words in (
            (("job", "ls"), [job, "created"]),
            (("job", "show", job), [job, "digits", "created"]),
            (("participants", "ls"), ["p1", "p2", "yes"]),
            (("storage", "inventory"), ["blobs", "unreferenced"]),
            (("storage", "scrub"), ["0 damaged"]),
            (("checkpoint", "ls", job), ["no checkpoints"]),
        ):
            code, out, err = await mesh.covey(*arguments)
            assert (code, err) == (0, ""), arguments
            for word in words:
                assert word in out, (arguments, out)


async def test_commands_check_the_jobs_state_and_name_it(mesh: Mesh) -> None:
    """Pause before start, start without anybody, an unknown job: exit 1, and the reason with --json."""
    job = (await value(mesh, "job", "create", str(DIGITS), "--data", str(DATASET)))["jobId"]

    paused = await mesh.covey("job", "pause", job, "--json")
    started = await mesh.covey("job", "start", job, "--json")
    unknown = await mesh.covey("job", "show", "nothing-here")
    deleted = await mesh.covey("job", "delete", job)

    assert (paused[0], json.loads(paused[2])["error"]["reason"]) == (1, "JOB_STATE")
    assert (started[0], json.loads(started[2])["error"]["reason"]) == (1, "NOT_ENOUGH_PARTICIPANTS")
    assert (unknown[0], unknown[1]) == (1, "")
    assert "nothing-here" in unknown[2]
    assert deleted[0] == 0, deleted[2]


async def test_a_request_id_makes_creation_idempotent_and_nothing_is_sent_twice(mesh: Mesh) -> None:
    """The same id gives the same job; another id another job; the blobs are there already."""
    arguments = ("job", "create", str(DIGITS), "--data", str(DATASET))

    first = await value(mesh, *arguments, "--request-id", "one")
    again = await value(mesh, *arguments, "--request-id", "one")
    other = await value(mesh, *arguments, "--request-id", "two")
    inventory = await value(mesh, "storage", "inventory")

    assert first["jobId"] == again["jobId"] != other["jobId"]
    files = len(load(DIGITS).files()) + len(json.loads(DATASET.read_text()))
    assert inventory["blobCount"] == files


async def test_validate_only_makes_and_uploads_nothing(mesh: Mesh) -> None:
    """It tells what would be refused, and says when only the upload is missing."""
    arguments = ("job", "create", str(DIGITS), "--data", str(DATASET), "--validate-only")

    fine = await value(mesh, *arguments)
    refused = await mesh.covey(*arguments, "--set", "hyperparameters.nope=1", "--json")
    jobs, inventory = await value(mesh, "job", "ls"), await value(mesh, "storage", "inventory")

    assert fine["valid"] is True
    assert refused[0] == 1
    assert json.loads(refused[2])["error"]["reason"] == "SETTINGS_MISMATCH"
    assert (jobs, inventory.get("blobCount", 0)) == ([], 0)


async def test_a_damaged_file_is_refused_before_anything_is_sent(mesh: Mesh, tmp_path: Path) -> None:
    """The manifest's promise is checked here: declared and found are both named."""
    package = tmp_path / "package"
    package.mkdir()
    for name in ("manifest.json", "model.wasm", "validation.bin"):
        (package / name).write_bytes((DIGITS / name).read_bytes())
    (package / "model.wasm").write_bytes(b"\0asm")

    code, out, err = await mesh.covey("job", "create", str(package), "--data", str(DATASET))

    assert (code, out) == (1, "")
    assert "module.sha256: model.wasm: declared" in err
    assert (await value(mesh, "storage", "inventory")).get("blobCount", 0) == 0


async def test_a_taken_port_and_a_folder_in_use_are_told(mesh: Mesh, clean: Mapping[str, str]) -> None:
    """A second `up` fails with a sentence that names what stands in its way, and the first goes on."""
    elsewhere = str(mesh.folder / "elsewhere")
    port = await covey("up", "--listen", mesh.address, "--folder", elsewhere, environment=clean)
    folder = await covey(
        "up", "--listen", "127.0.0.1:0", "--folder", str(mesh.folder / "state"), environment=clean
    )

    assert (port[0], port[1]) == (1, "")
    assert mesh.address in port[2]
    assert "taken" in port[2]
    assert (folder[0], folder[1]) == (1, "")
    assert f"in use by process {mesh.coordinator.pid}" in folder[2]
    assert "Traceback" not in port[2] + folder[2]
    assert await value(mesh, "job", "ls") == []


async def test_without_a_coordinator_commands_say_where_they_looked(clean: Mapping[str, str]) -> None:
    """Exit 1 within seconds, with the address and what to do."""
    began = time.monotonic()
    code, out, err = await covey("job", "ls", "--coordinator", "127.0.0.1:9", environment=clean)

    assert (code, out) == (1, "")
    assert "no coordinator answers at 127.0.0.1:9" in err
    assert "covey up" in err
    assert time.monotonic() - began < 15


async def test_a_refused_token_is_named_by_its_file(mesh: Mesh, tmp_path: Path) -> None:
    """And so is the absence of one."""
    wrong = tmp_path / "wrong.token"
    wrong.write_text("not.a.token")

    refused = await mesh.covey("job", "ls", "--token-file", str(wrong))
    missing = await mesh.covey("job", "ls", "--token-file", str(tmp_path / "lost.token"))

    assert refused[0] == missing[0] == 1
    assert str(wrong) in refused[2]
    assert "lost.token can't be read" in missing[2]


async def test_up_is_found_by_other_commands_and_forgotten_when_it_ends(
    tmp_path: Path, clean: Mapping[str, str]
) -> None:
    """No flags are needed on the machine where `covey up` runs, until it is stopped."""
    async with Mesh(tmp_path) as mesh:
        found = await covey("job", "ls", "--json", environment=clean)
    gone = await covey("job", "ls", environment=clean)

    assert (found[0], found[1]) == (0, "[]\n"), found[2]
    assert gone[0] == 1
    assert "(the default)" in gone[2]
    assert processes_with(str(tmp_path)) == []
    assert mesh.coordinator.returncode == 0


async def test_a_mesh_behind_tls_trains(tmp_path: Path, clean: Mapping[str, str]) -> None:
    """With a certificate `up` listens on all interfaces; commands on this machine find it, devices are told
    what to trust, and the coordinator reaches storage."""
    certificate, key = self_signed(tmp_path)
    mesh = Mesh(tmp_path)
    arguments = ["-m", "covey", "up", "--folder", str(tmp_path / "state"), "--listen", "0.0.0.0:0", "--json"]
    server = mesh.server("tls", [*arguments, "--tls-cert", str(certificate), "--tls-key", str(key)])
    mesh.servers["coordinator"] = server
    await server.start()
    try:
        mesh.address = await server.printed(r'"address": "([^"]+)"')
        await mesh.join("p1", "--root-cert", str(certificate))
        arguments = ["job", "create", str(DIGITS), "--data", str(DATASET), "--target-round", "1", "--json"]
        created = await covey(*arguments, environment=clean)
        assert created[0] == 0, created[2]
        job = json.loads(created[1])["jobId"]

        async def invited() -> bool:
            done = await covey("invite", job, "--all", "--wait", "--json", environment=clean)
            return done[0] == 0 and len(json.loads(done[1])["participants"]) == 1

        await eventually(invited, 30, "the device has accepted", 0.2)
        started = await covey("job", "start", job, environment=clean)
        watched = await covey("job", "watch", job, environment=clean, timeout=90)
    finally:
        await mesh.close()

    assert mesh.address.startswith("127.0.0.1:")
    assert (started[0], watched[0]) == (0, 0), started[2] + watched[2]
    assert "completed" in watched[1].splitlines()[-1]


async def test_an_interrupted_watch_ends_with_130_and_one_line(mesh: Mesh) -> None:
    """Ctrl-C is no failure that needs a traceback."""
    job = (await value(mesh, "job", "create", str(DIGITS), "--data", str(DATASET)))["jobId"]
    environment = {"COVEY_COORDINATOR": mesh.address, "COVEY_TOKEN_FILE": str(mesh.token_file)}
    server = mesh.server("watch", ["-m", "covey", "job", "watch", job])
    server._environment |= environment
    await server.start()
    await server.printed(r"(created)")

    os.kill(server.pid, 2)
    code = await asyncio.wait_for(server._process.wait(), 10)  # type: ignore[union-attr]  # it was started

    assert (code, server.tail()) == (130, "interrupted\n")


async def test_a_device_that_asks_waits_for_its_person(mesh: Mesh) -> None:
    """`covey join --ask` keeps the invitation; `covey device` shows, declines and accepts it, and steers."""
    job = (await value(mesh, "job", "create", str(DIGITS), "--data", str(DATASET)))["jobId"]
    other = (await value(mesh, "job", "create", str(DIGITS), "--data", str(DATASET)))["jobId"]
    await mesh.join("p1", "--ask")
    folder = ("--folder", str(mesh.folder / "participants" / "p1"))
    async with mesh.client() as client:
        await mesh.connected(client, 1)
        await client.participants.invite(job, all_connected=True)
        await client.participants.invite(other, all_connected=True)

        async def invited() -> bool:
            shown = await value(mesh, "device", "show", *folder)
            return len(shown.get("invitations", ())) == 2

        await eventually(invited, 20, "both invitations are there", 0.1)
        accepted = await value(mesh, "device", "accept", job, *folder)
        declined = await value(mesh, "device", "decline", other, *folder)
        states = [(await client.jobs.get(one)).participants[0].invitation for one in (job, other)]

    settings = await value(mesh, "device", "set", "--backend", "cpu", "--max-workers", "1", *folder)
    probed = await value(mesh, "device", "probe", str(DIGITS), *folder)
    nobody = await mesh.covey("device", "show", "--folder", str(mesh.folder))

    assert accepted["state"] == "INVITATION_STATE_ACCEPTED"
    assert declined["state"] == "INVITATION_STATE_DECLINED"
    assert states == [job_pb2.INVITATION_STATE_ACCEPTED, job_pb2.INVITATION_STATE_DECLINED]
    assert (settings["backendPreference"], settings["maxLocalWorkers"]) == ("BACKEND_PREFERENCE_CPU", 1)
    assert (probed["backend"], probed["fallbackReason"]) == ("CPU_WASM", "FALLBACK_REASON_PREFERENCE")
    assert (nobody[0], "covey join" in nobody[2]) == (1, True)


async def test_package_check_tells_what_the_module_is(clean: Mapping[str, str]) -> None:
    """Manifest, files and module are right; the weight count is the manifest's."""
    code, out, err = await covey("package", "check", str(DIGITS), "--json", environment=clean)

    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["name"], found["weight_count"]) == ("digits", 784 * 128 + 128 + 128 * 10 + 10)
    assert (found["module_checked"], found["validation_examples"]) == (True, 2000)


async def test_a_dataset_manifest_is_written_as_the_package_counts(
    tmp_path: Path, clean: Mapping[str, str]
) -> None:
    """The counts come from the package's loader, and the result is what the checkout has."""
    files = sorted(str(path) for path in (DIGITS / "data" / "train").iterdir())
    output = tmp_path / "dataset.json"

    code, _, err = await covey(
        *("data", "manifest", *files, "--format", "digits-v1", "--package", str(DIGITS), "-o", str(output)),
        environment=clean,
    )
    without = await covey("data", "manifest", *files[:1], "--format", "digits-v1", environment=clean)

    assert code == 0, err
    assert json.loads(output.read_text()) == json.loads(DATASET.read_text())
    assert without[0] == 2
    assert "--package is needed" in without[2]


async def test_the_program_in_the_quickstart_runs(tmp_path: Path) -> None:
    """What the page shows trains a model and exports it."""
    page = (ROOT / "docs" / "quickstart.md").read_text()
    program = page.split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "program.py").write_text(program)
    async with running(tmp_path, 2) as mesh:
        environment = os.environ | {
            "COVEY_COORDINATOR": mesh.address,
            "COVEY_TOKEN_FILE": str(mesh.token_file),
        }
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "program.py"), cwd=tmp_path, env=environment, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await asyncio.wait_for(process.communicate(), 120)

    assert process.returncode == 0
    assert out.decode().splitlines()[-1] == "4 of 4"
    assert (tmp_path / "digits.safetensors").stat().st_size > 400_000


async def test_help_comes_before_anyone_notices(clean: Mapping[str, str]) -> None:
    """`covey --help` takes less than half a second of computation and loads nothing heavy."""
    code, out, _ = await covey("--help", environment=clean)
    before = os.times()
    await covey("--help", environment=clean)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system

    assert (code, "demo" in out) == (0, True)
    assert spent < HELP_SECONDS


async def test_the_command_imports_nothing_heavy(clean: Mapping[str, str]) -> None:
    """What costs time is loaded by the command that needs it."""
    script = (
        "import sys, covey.cli; "
        "print([n for n in ('grpc', 'numpy', 'wasmtime', 'protovalidate', 'rich.table') if n in sys.modules])"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script), stdout=asyncio.subprocess.PIPE, env=dict(clean)
    )
    out, _ = await process.communicate()

    assert out.decode().strip() == "[]"
