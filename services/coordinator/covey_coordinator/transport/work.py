"""`WorkService`: the participants' side."""

import asyncio
from typing import Any, Protocol

import grpc.aio

from covey.v1 import job_pb2, work_service_pb2, work_service_pb2_grpc
from covey_coordinator.convert.values import time_to_proto
from covey_coordinator.convert.work import (
    Addresses,
    command_to_proto,
    delta_header_from_proto,
    evaluation_from_proto,
    failure_report_from_proto,
    joining_from_proto,
    progress_from_proto,
)
from covey_coordinator.domain.invitations import Invitations
from covey_coordinator.domain.mesh import Mesh
from covey_coordinator.domain.model import DeltaFile
from covey_coordinator.domain.results import Push, Results
from covey_kit.caller import current_caller
from covey_kit.errors import FailedPrecondition, InvalidArgument, Reason
from covey_kit.version import CONTRACT_VERSION, compatible

__all__ = ["Sink", "Spill", "WorkServicer"]

_WRITE_SECONDS = 30.0
"""A participant that doesn't read its commands for so long loses its stream."""


class Sink(Protocol):
    """Where one delta goes as it arrives."""

    async def write(self, data: bytes) -> None:
        """Takes the next bytes."""

    async def finish(self) -> DeltaFile:
        """Verifies it all; when it returns, the delta lasts."""

    async def abort(self) -> None:
        """Removes what came; does nothing after `finish`."""


class Spill(Protocol):
    """Where deltas go."""

    async def open(self, push: Push) -> Sink:
        """Prepares to receive a delta."""


class WorkServicer(work_service_pb2_grpc.WorkServiceServicer):
    """Hands calls of participants to the domain."""

    def __init__(
        self, mesh: Mesh, invitations: Invitations, results: Results, spill: Spill, addresses: Addresses
    ) -> None:
        self._mesh = mesh
        self._invitations = invitations
        self._results = results
        self._spill = spill
        self._addresses = addresses

    async def Join(self, request: work_service_pb2.JoinRequest, context: Any) -> None:
        if not compatible(request.contract_version):
            raise FailedPrecondition(
                Reason.CONTRACT_VERSION,
                f"you speak contract version {request.contract_version}, this coordinator speaks "
                f"{CONTRACT_VERSION}; update the older one",
                metadata={"client": request.contract_version, "server": CONTRACT_VERSION},
            )
        session = await self._mesh.join(joining_from_proto(request))
        try:
            while True:
                message = command_to_proto(await session.next(), self._addresses)
                async with asyncio.timeout(_WRITE_SECONDS):
                    await context.write(message)
        finally:
            self._mesh.left(session)

    async def RespondToInvitation(
        self, request: work_service_pb2.RespondToInvitationRequest, context: Any
    ) -> work_service_pb2.RespondToInvitationResponse:
        who = current_caller().subject
        answer = await self._invitations.respond(who, request.invitation_id, accept=request.accept)
        return work_service_pb2.RespondToInvitationResponse(
            job_id=answer.job_id,
            state=job_pb2.InvitationState.Value(f"INVITATION_STATE_{answer.state}"),
            grant=answer.grant,
        )

    async def ReportProgress(
        self, request: work_service_pb2.ReportProgressRequest, context: Any
    ) -> work_service_pb2.ReportProgressResponse:
        ends = self._results.progress(
            current_caller().subject, request.assignment_id, request.attempt, progress_from_proto(request)
        )
        return work_service_pb2.ReportProgressResponse(lease_expire_time=time_to_proto(ends))

    async def ReportFailure(
        self, request: work_service_pb2.ReportFailureRequest, context: Any
    ) -> work_service_pb2.ReportFailureResponse:
        await self._results.failure(current_caller().subject, failure_report_from_proto(request))
        return work_service_pb2.ReportFailureResponse()

    async def PushDelta(self, request_iterator: Any, context: Any) -> work_service_pb2.PushDeltaResponse:
        first = await context.read()
        if first is grpc.aio.EOF or not first.HasField("header"):
            raise InvalidArgument(
                Reason.INVALID_FIELD, "the first message must carry the header; found " + _part(first)
            )
        push = await self._results.open_push(current_caller().subject, delta_header_from_proto(first.header))
        if push is None:
            return work_service_pb2.PushDeltaResponse(already_accepted=True)
        try:
            delta = await self._receive(push, context)
            already = await self._results.accept(push, delta)
        except InvalidArgument as error:
            await self._results.refuse(push, error)
            raise
        finally:
            self._results.close_push(push)
        return work_service_pb2.PushDeltaResponse(already_accepted=already)

    async def _receive(self, push: Push, context: Any) -> DeltaFile:
        """Writes a delta to disk as it comes and verifies it."""
        sink = await self._spill.open(push)
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                if not message.HasField("data"):
                    raise InvalidArgument(
                        Reason.INVALID_FIELD, "only the first message may carry a header; found another"
                    )
                self._results.heard(push)
                await sink.write(message.data)
            return await sink.finish()
        finally:
            await sink.abort()

    async def PushEvaluation(
        self, request: work_service_pb2.PushEvaluationRequest, context: Any
    ) -> work_service_pb2.PushEvaluationResponse:
        already = await self._results.evaluation(current_caller().subject, evaluation_from_proto(request))
        return work_service_pb2.PushEvaluationResponse(already_accepted=already)

    async def LeaveJob(
        self, request: work_service_pb2.LeaveJobRequest, context: Any
    ) -> work_service_pb2.LeaveJobResponse:
        await self._invitations.leave(current_caller().subject, request.job_id)
        return work_service_pb2.LeaveJobResponse()


def _part(message: Any) -> str:
    return "the end of the stream" if message is grpc.aio.EOF else f"{message.WhichOneof('part')}"
