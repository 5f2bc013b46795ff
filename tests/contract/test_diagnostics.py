"""DiagnosticsService over a real connection."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from covey.v1 import common_pb2, snapshot_pb2
from covey.v1 import diagnostics_service_pb2 as pb
from covey.v1 import diagnostics_service_pb2_grpc as pb_grpc
from covey_diagnostics.app import DiagnosticsApp, DiagnosticsSettings
from covey_kit.caller import Role
from covey_kit.channel import connect
from covey_kit.errors import InvalidArgument, PermissionDenied, Unavailable
from covey_kit.serve import Host, ServeOptions
from covey_kit.status import rpc_errors
from covey_kit.tokens import SigningKey, Verifier
from support.eventually import eventually

Stale = pb.ParticipantExecution


def snapshot(
    participant: str, sequence: int, stage: int = common_pb2.STAGE_TRAINING
) -> snapshot_pb2.Snapshot:
    found = snapshot_pb2.Snapshot(
        participant_id=participant,
        sequence=sequence,
        stage=stage,  # type: ignore[arg-type]  # an int is as good on the wire
        job_id="job-1",
    )
    found.run_start_time.FromSeconds(1000)
    found.time.FromSeconds(1001)
    return found


class Mesh:
    """A diagnostics server and channels to it."""

    def __init__(self, host: Host, key: SigningKey) -> None:
        self.host = host
        self._key = key

    def stub(self, role: Role, subject: str = "me") -> tuple[grpc.aio.Channel, Any]:
        channel = connect(self.host.address, self._key.issue(subject, role, 60))
        return channel, pb_grpc.DiagnosticsServiceStub(channel)


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    """A diagnostics server of its own for the test."""
    key = SigningKey.generate()
    app = await DiagnosticsApp.open(DiagnosticsSettings())
    host = Host([app], Verifier([key.public_pem]), ServeOptions())
    await host.start()
    yield Mesh(host, key)
    await host.stop(grace=0)


async def test_reported_snapshots_are_watched_and_a_lost_participant_is_stale_at_once(mesh: Mesh) -> None:
    """A watcher sees a new snapshot, and DISCONNECTED as soon as the participant's stream ends."""
    channel, reporter = mesh.stub(Role.PARTICIPANT, "p1")
    watching, watcher = mesh.stub(Role.VIEWER)
    seen: list[pb.ParticipantExecution] = []

    async def watch() -> None:
        async for message in watcher.WatchSnapshots(pb.WatchSnapshotsRequest()):
            seen.extend(message.executions)

    task = asyncio.create_task(watch())
    call = reporter.ReportSnapshots()
    await call.write(pb.ReportSnapshotsRequest(snapshot=snapshot("p1", 1)))
    await eventually(lambda: len(seen) == 1, message="the snapshot is shown")
    assert seen[0].staleness == Stale.STALENESS_UNSPECIFIED
    assert not seen[0].snapshot.HasField("units_per_second")

    call.cancel()
    await eventually(
        lambda: seen[-1].staleness == Stale.STALENESS_DISCONNECTED, timeout=2, message="it is stale at once"
    )
    task.cancel()
    await channel.close()
    await watching.close()


async def test_repeated_snapshots_are_counted_as_dropped(mesh: Mesh) -> None:
    """The answer says how many were taken and how many were old."""
    channel, reporter = mesh.stub(Role.PARTICIPANT, "p1")

    async def messages() -> AsyncIterator[pb.ReportSnapshotsRequest]:
        for sequence in (1, 3, 2, 3, 4):
            yield pb.ReportSnapshotsRequest(snapshot=snapshot("p1", sequence))

    answer = await reporter.ReportSnapshots(messages())

    assert (answer.accepted, answer.dropped) == (3, 2)
    await channel.close()


async def test_nobody_reports_for_another(mesh: Mesh) -> None:
    """A participant's token is good for its own snapshots only."""
    channel, reporter = mesh.stub(Role.PARTICIPANT, "p1")

    async def messages() -> AsyncIterator[pb.ReportSnapshotsRequest]:
        yield pb.ReportSnapshotsRequest(snapshot=snapshot("p2", 1))

    with pytest.raises(PermissionDenied), rpc_errors():
        await reporter.ReportSnapshots(messages())
    await channel.close()


async def test_executions_are_listed_page_by_page(mesh: Mesh) -> None:
    """Every participant comes once, in order of its id; a made-up token is refused."""
    for name in ("p3", "p1", "p2"):
        channel, reporter = mesh.stub(Role.PARTICIPANT, name)

        async def messages(name: str = name) -> AsyncIterator[pb.ReportSnapshotsRequest]:
            yield pb.ReportSnapshotsRequest(snapshot=snapshot(name, 1))

        await reporter.ReportSnapshots(messages())
        await channel.close()
    channel, viewer = mesh.stub(Role.VIEWER)
    names: list[str] = []
    token = ""
    while True:
        page = await viewer.ListParticipantExecutions(
            pb.ListParticipantExecutionsRequest(page_size=2, page_token=token)
        )
        names += [execution.snapshot.participant_id for execution in page.executions]
        token = page.next_page_token
        if not token:
            break

    assert names == ["p1", "p2", "p3"]
    with pytest.raises(InvalidArgument), rpc_errors():
        await viewer.ListParticipantExecutions(pb.ListParticipantExecutionsRequest(page_token="junk"))
    await channel.close()


async def test_watchers_are_told_when_the_server_stops(mesh: Mesh) -> None:
    """Draining ends watches with UNAVAILABLE instead of cutting them."""
    channel, watcher = mesh.stub(Role.OWNER)
    call = watcher.WatchSnapshots(pb.WatchSnapshotsRequest())
    assert await call.read() == pb.WatchSnapshotsResponse()

    stopping = asyncio.create_task(mesh.host.stop(grace=2))
    with pytest.raises(Unavailable), rpc_errors():
        await call.read()
    await stopping
    await channel.close()
