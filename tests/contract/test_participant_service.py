"""`ParticipantService`, over its real port."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from covey.v1 import common_pb2, job_pb2, package_pb2, participant_service_pb2_grpc
from covey.v1 import participant_service_pb2 as pb
from covey_kit.channel import connect
from covey_kit.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Reason,
    Unauthenticated,
    Unavailable,
)
from covey_kit.status import rpc_errors
from covey_participant.app import CONTROL_ADDRESS, CONTROL_TOKEN, ParticipantApp
from covey_participant.transport.participant_servicer import ParticipantServicer
from support.coordinator import mesh
from support.device import create_job, device
from support.eventually import eventually
from support.wat_packages import manifest, wasm, write_package

pytestmark = pytest.mark.may_block

NOBODY = "127.0.0.1:9"


class Control:
    """A caller of the device's control port."""

    def __init__(self, stub: Any, app: ParticipantApp) -> None:
        self.stub = stub
        self.app = app

    async def call(self, method: str, request: Any) -> Any:
        """Calls a method; errors come as CoveyError."""
        with rpc_errors():
            return await getattr(self.stub, method)(request)

    async def state(self) -> pb.ParticipantState:
        """The device as it is now."""
        found: pb.ParticipantState = (await self.call("GetState", pb.GetStateRequest())).state
        return found


@asynccontextmanager
async def controlled(address: str, folder: Path, **settings: Any) -> AsyncIterator[Control]:
    """A device and a caller with its own token."""
    async with device(address, folder, **settings) as app:
        await eventually((folder / CONTROL_ADDRESS).exists)
        token = (folder / CONTROL_TOKEN).read_text()
        async with connect((folder / CONTROL_ADDRESS).read_text(), token) as channel:
            yield Control(participant_service_pb2_grpc.ParticipantServiceStub(channel), app)


def test_every_method_of_the_contract_is_served() -> None:
    """A new method can't be forgotten."""
    base = participant_service_pb2_grpc.ParticipantServiceServicer
    service = pb.DESCRIPTOR.services_by_name["ParticipantService"]

    for method in service.methods:
        assert getattr(ParticipantServicer, method.name) is not getattr(base, method.name), method.name


async def test_the_state_says_who_and_what_the_device_is(tmp_path: Path) -> None:
    """Identity, connection, settings, device and an idle snapshot; what isn't known is absent."""
    async with controlled(NOBODY, tmp_path, display_name="lamp") as control:
        await eventually(lambda: control.app.control.disconnected_reason != "not connected yet")
        state = await control.state()

    assert state.participant_id == control.app.identity.participant_id
    assert (state.display_name, state.coordinator_address) == ("lamp", NOBODY)
    assert not state.connected
    assert "nobody answers" in state.disconnected_reason
    assert state.device.runtime.startswith("wasmtime 50")
    assert state.device.cpu_cores >= 1
    assert state.snapshot.stage == common_pb2.STAGE_IDLE
    for field in ("job_id", "units", "units_done", "units_per_second", "workers", "module_sha256", "adapter"):
        assert not state.snapshot.HasField(field), field
    assert state.settings.accept_all
    assert not state.settings.HasField("max_local_workers")


async def test_the_token_file_is_needed_and_private(tmp_path: Path) -> None:
    """Nobody without the file's token may look; the file is its owner's alone."""
    async with controlled(NOBODY, tmp_path) as control:
        address = (tmp_path / CONTROL_ADDRESS).read_text()
        assert address.startswith("127.0.0.1:")
        async with connect(address) as channel:
            stranger = Control(participant_service_pb2_grpc.ParticipantServiceStub(channel), control.app)
            with pytest.raises(Unauthenticated):
                await stranger.state()
        assert (tmp_path / CONTROL_TOKEN).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "identity.json").stat().st_mode & 0o777 == 0o600


async def test_settings_are_kept_over_restarts(tmp_path: Path) -> None:
    """Each setter answers with what is in force; a new run begins with it."""
    async with controlled(NOBODY, tmp_path) as control:
        cpu = pb.SetBackendPreferenceRequest(preference=common_pb2.BACKEND_PREFERENCE_CPU)
        await control.call("SetBackendPreference", cpu)
        await control.call("SetMaxLocalWorkers", pb.SetMaxLocalWorkersRequest(max_local_workers=1))
        budget = pb.SetGpuMemoryBudgetMiBRequest(gpu_memory_budget_mib=512)
        answer = await control.call("SetGpuMemoryBudgetMiB", budget)
        expected = pb.ParticipantSettings(
            backend_preference=common_pb2.BACKEND_PREFERENCE_CPU,
            max_local_workers=1,
            gpu_memory_budget_mib=512,
            accept_all=True,
        )
        assert answer.settings == expected
    async with controlled(NOBODY, tmp_path, accept_all=None) as control:
        assert (await control.state()).settings == expected
        answer = await control.call("SetGpuMemoryBudgetMiB", pb.SetGpuMemoryBudgetMiBRequest())
        assert not answer.settings.HasField("gpu_memory_budget_mib")


@pytest.mark.parametrize("workers", [0, 1000])
async def test_workers_beyond_the_cores_are_refused(tmp_path: Path, workers: int) -> None:
    """INVALID_ARGUMENT names the field and its bounds."""
    async with controlled(NOBODY, tmp_path) as control:
        with pytest.raises(InvalidArgument) as caught:
            await control.call("SetMaxLocalWorkers", pb.SetMaxLocalWorkersRequest(max_local_workers=workers))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert [violation.field for violation in caught.value.violations] == ["max_local_workers"]


async def test_a_watcher_sees_each_change(tmp_path: Path) -> None:
    """The state comes at once, and again when a setting changes."""
    async with controlled(NOBODY, tmp_path) as control:
        watch = control.stub.WatchState(pb.WatchStateRequest())
        first = await watch.read()
        assert first.state.participant_id == control.app.identity.participant_id
        await control.call("SetMaxLocalWorkers", pb.SetMaxLocalWorkersRequest(max_local_workers=1))

        async def seen() -> bool:
            return bool((await watch.read()).state.settings.max_local_workers == 1)

        await eventually(seen)
        watch.cancel()


async def test_a_probe_tells_the_backend_and_why(tmp_path: Path) -> None:
    """The device alone; a package without a GPU half; a preference for the CPU."""
    package = json_format.ParseDict(manifest(wasm()), package_pb2.ModelPackage())
    async with controlled(NOBODY, tmp_path) as control:
        alone = await control.call("Probe", pb.ProbeRequest())
        plain = await control.call("Probe", pb.ProbeRequest(package=package))
        cpu = pb.SetBackendPreferenceRequest(preference=common_pb2.BACKEND_PREFERENCE_CPU)
        await control.call("SetBackendPreference", cpu)
        preferred = await control.call("Probe", pb.ProbeRequest(package=package))

    assert alone.backend == common_pb2.BACKEND_UNSPECIFIED
    assert (plain.backend, plain.fallback_reason) == (
        common_pb2.CPU_WASM,
        common_pb2.FALLBACK_REASON_NOT_DECLARED,
    )
    assert "GPU_WGPU" in plain.message
    assert preferred.fallback_reason == common_pb2.FALLBACK_REASON_PREFERENCE


async def test_an_invitation_waits_for_its_person(tmp_path: Path) -> None:
    """With --ask nothing is accepted by itself; the person's answer reaches the coordinator."""
    package = write_package(tmp_path / "package")
    async with (
        mesh(tmp_path / "mesh") as running,
        controlled(running.address, tmp_path / "device", accept_all=False) as control,
    ):
        await eventually(lambda: control.app.control.connected)
        job_id = await create_job(running, package)
        await running.invite_all(job_id, 0)

        async def listed() -> Any:
            return (await control.call("ListInvitations", pb.ListInvitationsRequest())).invitations

        (invitation,) = await eventually(listed)
        assert (invitation.job_id, invitation.state) == (job_id, job_pb2.INVITATION_STATE_PENDING)
        assert invitation.package_name == "adder"

        request = pb.ParticipantServiceRespondToInvitationRequest
        answer = request(invitation_id=invitation.invitation_id, accept=True)
        accepted = (await control.call("RespondToInvitation", answer)).invitation
        assert accepted.state == job_pb2.INVITATION_STATE_ACCEPTED
        assert (await control.call("RespondToInvitation", answer)).invitation == accepted
        participants = (await running.job(job_id)).participants
        assert [p.invitation for p in participants] == [job_pb2.INVITATION_STATE_ACCEPTED]

        with pytest.raises(FailedPrecondition) as caught:
            await control.call(
                "RespondToInvitation", request(invitation_id=invitation.invitation_id, accept=False)
            )
        assert caught.value.reason is Reason.INVITATION_STATE
        with pytest.raises(NotFound) as missing:
            await control.call("RespondToInvitation", request(invitation_id="nothing", accept=True))
        assert missing.value.reason is Reason.INVITATION_NOT_FOUND

        await running.stop()
        await eventually(lambda: not control.app.control.connected)
        with pytest.raises(Unavailable):
            await control.call("RespondToInvitation", answer)
        await running.start()
