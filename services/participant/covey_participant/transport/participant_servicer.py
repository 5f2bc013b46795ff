"""`ParticipantService`: local control of this device."""

from collections.abc import AsyncIterator, Callable
from typing import Any

from covey.v1 import participant_service_pb2 as pb
from covey.v1 import participant_service_pb2_grpc
from covey_participant import convert
from covey_participant.domain.device import DeviceControl


class ParticipantServicer(participant_service_pb2_grpc.ParticipantServiceServicer):
    """Validated requests in, replies out; everything else is `DeviceControl`'s."""

    def __init__(self, control: DeviceControl, show: Callable[[], pb.ParticipantState]) -> None:
        self._control = control
        self._show = show

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.GetStateResponse:
        return pb.GetStateResponse(state=self._show())

    async def WatchState(
        self, request: pb.WatchStateRequest, context: Any
    ) -> AsyncIterator[pb.WatchStateResponse]:
        async for _ in self._control.changes():
            yield pb.WatchStateResponse(state=self._show())

    async def SetBackendPreference(
        self, request: pb.SetBackendPreferenceRequest, context: Any
    ) -> pb.SetBackendPreferenceResponse:
        preference = convert.preference_from_proto(request.preference)
        settings = await self._control.set(preference=preference)
        return pb.SetBackendPreferenceResponse(settings=convert.settings_to_proto(settings))

    async def SetMaxLocalWorkers(
        self, request: pb.SetMaxLocalWorkersRequest, context: Any
    ) -> pb.SetMaxLocalWorkersResponse:
        settings = await self._control.set_max_local_workers(request.max_local_workers)
        return pb.SetMaxLocalWorkersResponse(settings=convert.settings_to_proto(settings))

    async def SetGpuMemoryBudgetMiB(
        self, request: pb.SetGpuMemoryBudgetMiBRequest, context: Any
    ) -> pb.SetGpuMemoryBudgetMiBResponse:
        budget = request.gpu_memory_budget_mib if request.HasField("gpu_memory_budget_mib") else None
        settings = await self._control.set(gpu_memory_budget_mib=budget)
        return pb.SetGpuMemoryBudgetMiBResponse(settings=convert.settings_to_proto(settings))

    async def ListInvitations(
        self, request: pb.ListInvitationsRequest, context: Any
    ) -> pb.ListInvitationsResponse:
        invitations = [convert.invitation_to_proto(found) for found in self._control.invitations.all()]
        return pb.ListInvitationsResponse(invitations=invitations)

    async def RespondToInvitation(
        self, request: pb.ParticipantServiceRespondToInvitationRequest, context: Any
    ) -> pb.ParticipantServiceRespondToInvitationResponse:
        invitation = await self._control.respond(request.invitation_id, accept=request.accept)
        return pb.ParticipantServiceRespondToInvitationResponse(
            invitation=convert.invitation_to_proto(invitation)
        )

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> pb.ProbeResponse:
        await self._control.adapters_found()
        device = convert.device_to_proto(self._control.device())
        if not request.HasField("package"):
            return pb.ProbeResponse(device=device)
        choice = await self._control.probe(
            convert.package_from_proto(request.package), convert.default_config(request.package)
        )
        return pb.ProbeResponse(
            device=device,
            backend=convert.backend_to_proto(choice.backend),
            fallback_reason=convert.choice_fallback(choice),
            message=choice.message,
        )
