"""A participant's snapshots at a real diagnostics service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from covey.v1 import common_pb2, diagnostics_service_pb2_grpc, job_pb2
from covey.v1 import diagnostics_service_pb2 as pb
from covey_diagnostics.app import DiagnosticsApp, DiagnosticsSettings
from covey_kit.caller import Role
from covey_kit.channel import connect
from covey_kit.serve import Host, ServeOptions
from covey_kit.tokens import SigningKey, Verifier
from support.coordinator import mesh
from support.device import create_job, device
from support.eventually import eventually
from support.wat_packages import write_package


@asynccontextmanager
async def diagnostics(key: SigningKey, port: int) -> AsyncIterator[Host]:
    """A diagnostics service on a port of its own."""
    app = await DiagnosticsApp.open(DiagnosticsSettings())
    host = Host([app], Verifier([key.public_pem]), ServeOptions(port=port))
    await host.start()
    try:
        yield host
    finally:
        await host.stop(grace=0)


async def newest(address: str, key: SigningKey) -> pb.ParticipantExecution | None:
    """What diagnostics knows of the only participant."""
    async with connect(address, key.issue("owner", Role.OWNER, 60)) as channel:
        stub = diagnostics_service_pb2_grpc.DiagnosticsServiceStub(channel)
        found = await stub.ListParticipantExecutions(pb.ListParticipantExecutionsRequest())
    return found.executions[0] if found.executions else None


async def test_snapshots_show_what_a_device_does(tmp_path: Path) -> None:
    """Idle first; then stage, times, counts and module of the assignment; idle again. Diagnostics may go and
    come back without disturbing the work."""
    package = await asyncio.to_thread(write_package, tmp_path / "package", "never-done")
    home = tmp_path / "mesh" / "coordinator"
    key = await asyncio.to_thread(SigningKey.load_or_create, home / "signing-key.pem")
    async with diagnostics(key, 0) as first:
        address = first.address
        async with mesh(tmp_path / "mesh", told_diagnostics_address=address) as running:
            job_id = await create_job(running, package)
            async with device(running.address, tmp_path / "device", display_name="lamp") as app:

                async def snapshot() -> pb.ParticipantExecution:
                    found = await newest(address, key)
                    assert found is not None
                    return found

                idle = (await eventually(snapshot)).snapshot
                assert idle.stage == common_pb2.STAGE_IDLE
                assert idle.participant_id == app.identity.participant_id
                assert not idle.HasField("job_id")
                await running.begin(job_id, 1)

                async def training() -> pb.ParticipantExecution:
                    found = await snapshot()
                    assert found.snapshot.stage == common_pb2.STAGE_TRAINING
                    assert found.snapshot.HasField("units_done")
                    return found

                busy = (await eventually(training)).snapshot
                assert (busy.job_id, busy.round, busy.units, busy.batch_size) == (job_id, 1, 6, 4)
                assert busy.backend == common_pb2.CPU_WASM
                assert busy.fallback_reason == common_pb2.FALLBACK_REASON_NOT_DECLARED
                assert busy.module_sha256 == package.manifest["module"]["sha256"]
                assert busy.workers == 1
                assert {entry.stage for entry in busy.stage_durations} >= {
                    common_pb2.STAGE_FETCHING,
                    common_pb2.STAGE_LOADING,
                    common_pb2.STAGE_TRAINING,
                }
                assert busy.sequence > idle.sequence

                await first.stop(grace=0)
                await eventually(lambda: app.desk.execution is not None)
                async with diagnostics(key, int(address.rpartition(":")[2])):
                    again = (await eventually(training)).snapshot
                    assert again.sequence > busy.sequence
                    job = await running.job(job_id)
                    assert job.state == job_pb2.JOB_STATE_RUNNING
                    assert job.current_round.assignments[0].attempt == 1
