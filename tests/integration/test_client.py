"""The SDK against real servers in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from covey.client import Client, UploadProgress, connect
from covey.client._storage import LocalBlob
from covey.packages import Dataset, Package, load, load_dataset
from covey.v1 import coordinator_service_pb2, job_pb2
from covey_coordinator.app import CoordinatorApp, CoordinatorSettings
from covey_kit.bulk import digest_file
from covey_kit.caller import Role
from covey_kit.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Reason,
    Unauthenticated,
    Unavailable,
)
from covey_kit.serve import Host, ServeOptions
from covey_kit.tokens import SigningKey, Verifier
from covey_storage.app import StorageApp, StorageSettings
from support.packages import DIGITS

KEY = SigningKey.generate()
OWNER = KEY.issue("owner", Role.OWNER, 600)


@pytest.fixture(autouse=True)
def _no_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's own `covey up` remembered has no say here."""
    monkeypatch.setenv("COVEY_CONFIG_FOLDER", str(tmp_path / "config"))
    monkeypatch.delenv("COVEY_COORDINATOR", raising=False)
    monkeypatch.delenv("COVEY_TOKEN_FILE", raising=False)


@asynccontextmanager
async def serving(folder: Path, port: int = 0) -> AsyncIterator[str]:
    """Coordinator and storage on one port; yields the address."""
    async with hosted(folder, port) as (address, _):
        yield address


@asynccontextmanager
async def hosted(folder: Path, port: int = 0) -> AsyncIterator[tuple[str, CoordinatorApp]]:
    """The same; yields the coordinator too."""
    storage = await StorageApp.open(StorageSettings(folder=folder / "storage"))
    coordinator = await CoordinatorApp.open(CoordinatorSettings(folder=folder / "coordinator"), KEY)
    host = Host([storage, coordinator], Verifier([KEY.public_pem]), ServeOptions(port=port))
    coordinator.use_storage(host.bind())
    await host.start()
    try:
        yield host.address, coordinator
    finally:
        await host.stop(grace=0)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """An owner's client."""
    async with serving(tmp_path / "state") as address, connect(address, token=OWNER) as made:
        yield made


def blob(path: Path, content: bytes) -> LocalBlob:
    """Writes a file and returns it by its content."""
    path.write_bytes(content)
    size, sha256 = digest_file(path)
    return LocalBlob(path, sha256, size)


async def test_an_upload_tells_how_far_it_is_and_sends_nothing_twice(client: Client, tmp_path: Path) -> None:
    """Progress only grows and ends with everything; equal contents are sent once, known ones never."""
    files = [blob(tmp_path / f"{n}.bin", bytes([n]) * (3 << 20)) for n in range(3)]
    files.append(blob(tmp_path / "again.bin", bytes([0]) * (3 << 20)))
    seen: list[UploadProgress] = []

    sent = await client.storage.upload(files, on_progress=seen.append)
    sent_again = await client.storage.upload(files)

    done = [progress.bytes_done for progress in seen]
    assert (sent, sent_again) == (3, 0)
    assert done == sorted(done)
    assert (seen[0].bytes_done, seen[-1].bytes_done, seen[-1].bytes_total) == (0, 9 << 20, 9 << 20)
    assert (seen[-1].files_done, seen[-1].files_total) == (3, 3)
    assert (await client.storage.inventory()).blob_count == 3


async def test_a_file_that_changed_since_it_was_hashed_is_refused(client: Client, tmp_path: Path) -> None:
    """The digest that was promised is the only content that can become visible under it."""
    file = blob(tmp_path / "x.bin", b"as it was hashed")
    file.path.write_bytes(b"as it changed!!!")

    with pytest.raises(InvalidArgument) as refused:
        await client.storage.upload([file])

    assert refused.value.reason is Reason.DIGEST_MISMATCH
    assert (await client.storage.inventory()).blob_count == 0


async def test_lists_are_read_to_their_last_page(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the server's pages are, the caller gets one list, the newest job first."""
    package, dataset = await _digits()
    made = [(await client.jobs.create(package, dataset, display_name=f"job {n}")).job_id for n in range(5)]
    stub = client.jobs._stub
    original = stub.ListJobs

    def small(request: coordinator_service_pb2.ListJobsRequest) -> object:
        request.page_size = 2
        return original(request)

    monkeypatch.setattr(stub, "ListJobs", small)

    assert [job.job_id for job in await client.jobs.list()] == made[::-1]
    assert await client.jobs.list([job_pb2.JOB_STATE_FAILED]) == []


async def _digits() -> tuple[Package, Dataset]:
    package = await asyncio.to_thread(load, DIGITS)
    return package, await asyncio.to_thread(load_dataset, DIGITS / "data" / "dataset.json", package)


async def test_a_watch_survives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    """The watcher sees the job again after the server came back on its port."""
    package, dataset = await _digits()
    states: list[job_pb2.JobState.ValueType] = []
    seen = asyncio.Event()

    async def follow(client: Client, job_id: str) -> None:
        async for job in client.jobs.watch(job_id):
            states.append(job.state)
            seen.set()

    async with serving(tmp_path / "state") as address:
        port = int(address.rpartition(":")[2])
        client = connect(address, token=OWNER)
        job = await client.jobs.create(package, dataset)
        watcher = asyncio.create_task(follow(client, job.job_id))
        await asyncio.wait_for(seen.wait(), 10)
    seen.clear()
    async with serving(tmp_path / "state", port):
        await asyncio.wait_for(seen.wait(), 10)
        await client.jobs.stop(job.job_id)
        await asyncio.wait_for(watcher, 10)

        await client.close()
    assert states[0] == job_pb2.JOB_STATE_CREATED
    assert states[-1] == job_pb2.JOB_STATE_STOPPED


async def test_a_watch_always_tells_the_end(tmp_path: Path) -> None:
    """Also when the job ends just while the state before is being sent."""
    package, dataset = await _digits()
    async with hosted(tmp_path / "state") as (address, coordinator), connect(address, token=OWNER) as client:
        job = await client.jobs.create(package, dataset)
        sights = coordinator._queries.watch(job.job_id, 0.01)
        first = (await anext(sights)).record.state
        await client.jobs.stop(job.job_id)

        rest = [sight.record.state async for sight in sights]

    assert not first.ended
    assert rest
    assert rest[-1].ended


async def test_a_watch_gives_up_when_its_patience_is_over(tmp_path: Path) -> None:
    """A coordinator that never comes back is told as such."""
    package, dataset = await _digits()
    async with serving(tmp_path / "state") as address:
        client = connect(address, token=OWNER)
        job = await client.jobs.create(package, dataset)
    with pytest.raises(Unavailable, match="no coordinator answers"):
        async for _ in client.jobs.watch(job.job_id, patience=0.3):
            pass

    await client.close()


async def test_an_export_that_fails_leaves_no_file(client: Client, tmp_path: Path) -> None:
    """No checkpoint yet: NOT_FOUND, and the folder is as it was."""
    package, dataset = await _digits()
    job = await client.jobs.create(package, dataset)
    target = tmp_path / "out"
    target.mkdir()

    with pytest.raises(NotFound):
        await client.checkpoints.export(job.job_id, target / "x.safetensors")

    assert list(target.iterdir()) == []


async def test_what_answers_must_be_a_coordinator(tmp_path: Path) -> None:
    """Storage on the port is told apart from a coordinator, with what it serves."""
    storage = await StorageApp.open(StorageSettings(folder=tmp_path / "storage"))
    host = Host([storage], Verifier([KEY.public_pem]), ServeOptions())
    address = await host.start()
    try:
        with pytest.raises(FailedPrecondition, match="no coordinator; it serves .*StorageService"):
            async with connect(address, token=OWNER):
                pass
    finally:
        await host.stop(grace=0)


async def test_who_may_not_is_told_so_and_by_which_token(client: Client, tmp_path: Path) -> None:
    """A viewer can't create; no token at all is a matter of its own."""
    viewer = tmp_path / "viewer.token"
    viewer.write_text(KEY.issue("v", Role.VIEWER, 600))
    address = client.server.address

    async with connect(address, token_file=viewer) as other:
        assert await other.jobs.list() == []
        with pytest.raises(PermissionDenied):
            await other.jobs.start("any-job")
    async with connect(address) as nobody:
        with pytest.raises(Unauthenticated, match="no token file is known"):
            await nobody.jobs.list()
    expired = tmp_path / "expired.token"
    expired.write_text(KEY.issue("o", Role.OWNER, -3600))
    async with connect(address, token_file=expired) as late:
        with pytest.raises(Unauthenticated, match=r"expired\.token") as refused:
            await late.jobs.list()

    assert refused.value.reason is Reason.TOKEN_EXPIRED


async def test_violations_of_the_coordinator_reach_the_caller(client: Client) -> None:
    """With the contract's field paths, all at once."""
    package, dataset = await _digits()
    settings = job_pb2.JobSettings(hyperparameters={"nope": 1.0, "momentum": 7.0})

    with pytest.raises(InvalidArgument) as refused:
        await client.jobs.create(package, dataset, settings)

    assert refused.value.reason is Reason.SETTINGS_MISMATCH
    assert len(refused.value.violations) == 2
