"""The device that joined from this machine, as the person at it sees it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from covey.v1 import common_pb2, package_pb2, work_service_pb2
from covey.v1 import participant_service_pb2 as pb
from covey.v1 import participant_service_pb2_grpc as pb_grpc
from covey_kit.channel import connect
from covey_kit.errors import NotFound, Reason, Unavailable
from covey_kit.status import rpc_errors

__all__ = ["Device", "open_device"]

ADDRESS_FILE, TOKEN_FILE = "control.address", "control.token"


class Device:
    """A running `covey join`, through its local control port. An async context manager."""

    def __init__(self, folder: Path, address: str, token: str) -> None:
        self._folder = folder
        self._channel = connect(address, token)
        self._stub = pb_grpc.ParticipantServiceStub(self._channel)

    async def state(self) -> pb.ParticipantState:
        """Returns what the device is doing, what is set, and its invitations."""
        with self._calls():
            return (await self._stub.GetState(pb.GetStateRequest())).state

    async def respond(self, invitation_id: str, *, accept: bool) -> work_service_pb2.Invitation:
        """Accepts or declines an invitation, and returns where it stands.

        Raises:
            NotFound: no such invitation.
            FailedPrecondition: INVITATION_STATE: answered otherwise or ended.
        """
        request = pb.ParticipantServiceRespondToInvitationRequest(invitation_id=invitation_id, accept=accept)
        with self._calls():
            return (await self._stub.RespondToInvitation(request)).invitation

    async def set_backend(self, preference: common_pb2.BackendPreference.ValueType) -> pb.ParticipantSettings:
        """Sets what to run on, from the next assignment on, and returns the settings in force."""
        request = pb.SetBackendPreferenceRequest(preference=preference)
        with self._calls():
            return (await self._stub.SetBackendPreference(request)).settings

    async def set_max_workers(self, workers: int) -> pb.ParticipantSettings:
        """Sets how many local workers an assignment may use, and returns the settings in force.

        Raises:
            InvalidArgument: 0, or more than the device's cores.
        """
        request = pb.SetMaxLocalWorkersRequest(max_local_workers=workers)
        with self._calls():
            return (await self._stub.SetMaxLocalWorkers(request)).settings

    async def set_gpu_budget(self, mib: int | None) -> pb.ParticipantSettings:
        """Sets the GPU memory of an assignment in MiB (None: no bound), and returns the settings in force."""
        request = pb.SetGpuMemoryBudgetMiBRequest(gpu_memory_budget_mib=mib)
        with self._calls():
            return (await self._stub.SetGpuMemoryBudgetMiB(request)).settings

    async def probe(self, package: package_pb2.ModelPackage | None = None) -> pb.ProbeResponse:
        """Returns what the device could run the package on and, where not the GPU, why not."""
        with self._calls():
            return await self._stub.Probe(pb.ProbeRequest(package=package))

    @contextmanager
    def _calls(self) -> Iterator[None]:
        try:
            with rpc_errors():
                yield
        except Unavailable as error:
            raise _nobody(self._folder) from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()


def _nobody(folder: Path) -> NotFound:
    return NotFound(
        Reason.PARTICIPANT_NOT_FOUND,
        f"no device runs with its state in {folder}; start one with `covey join`, or name it with --folder",
        resource=("folder", str(folder)),
    )


def open_device(folder: Path) -> Device:
    """Returns the device whose `covey join` has its state in `folder`. Call it where an event loop runs.

    Raises:
        NotFound: none runs there.
    """
    try:
        address = (folder / ADDRESS_FILE).read_text("ascii").strip()
        token = (folder / TOKEN_FILE).read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _nobody(folder) from error
    return Device(folder, address, token)
