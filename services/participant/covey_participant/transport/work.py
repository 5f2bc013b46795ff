"""What goes up to the coordinator: progress, results, failures, answers to invitations."""

import asyncio
from collections.abc import Awaitable
from contextlib import aclosing
from pathlib import Path

import grpc.aio

from covey.v1 import work_service_pb2, work_service_pb2_grpc
from covey_kit.blobs import file_blocks
from covey_kit.errors import DeadlineExceeded, Reason
from covey_kit.status import rpc_errors
from covey_participant import convert
from covey_participant.domain.execution import Execution
from covey_participant.domain.failure import WorkFailure
from covey_participant.domain.invitations import InvitationState
from covey_participant.domain.ports import OnTransfer
from covey_participant.domain.values import Assignment, Result

ANSWER_SECONDS = 60.0
"""How long the coordinator may take to put a delta on disk and answer."""

IDLE_SECONDS = 60.0


class WorkClient:
    """The domain's `Results` over `WorkService`. Each method raises CoveyError and makes one try.

    Args:
        channel: to the coordinator, with the session's token.
        participant_id: named in failures.
    """

    def __init__(self, channel: grpc.aio.Channel, participant_id: str) -> None:
        self._stub = work_service_pb2_grpc.WorkServiceStub(channel)
        self._participant_id = participant_id

    async def progress(self, execution: Execution) -> None:
        """Reports progress and renews the lease."""
        with rpc_errors():
            await self._stub.ReportProgress(convert.progress_to_proto(execution))

    async def failure(self, key: tuple[str, int], reason: Reason, message: str, *, package: bool) -> None:
        """Gives an assignment back."""
        request = convert.failure_to_proto(
            key, reason, message, package=package, participant_id=self._participant_id
        )
        with rpc_errors():
            await self._stub.ReportFailure(request)

    async def deliver(self, assignment: Assignment, result: Result, on_transfer: OnTransfer) -> None:
        """Sends a result: an evaluation as a message, everything else as a stream of the delta's bytes."""
        if not result.path:
            with rpc_errors():
                await self._stub.PushEvaluation(convert.evaluation_to_proto(assignment, result))
            return
        with rpc_errors():
            await self._push(assignment, result, on_transfer)

    async def _push(self, assignment: Assignment, result: Result, on_transfer: OnTransfer) -> None:
        call = self._stub.PushDelta()
        sent = 0
        try:
            try:
                header = convert.delta_header_to_proto(assignment, result)
                await _bounded(call.write(work_service_pb2.PushDeltaRequest(header=header)))
                async with aclosing(file_blocks(Path(result.path))) as blocks:
                    async for block in blocks:
                        await _bounded(call.write(work_service_pb2.PushDeltaRequest(data=block)))
                        sent += len(block)
                        on_transfer(sent, result.size)
                await call.done_writing()
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                pass  # it answered before it had everything; the answer says why
            except OSError as error:
                raise WorkFailure(
                    Reason.DEVICE, f"the result can't be read back: {error.strerror}"
                ) from error
            async with asyncio.timeout(ANSWER_SECONDS):
                await call
        except TimeoutError as error:
            raise DeadlineExceeded(Reason.DEADLINE, "the coordinator doesn't take the delta") from error
        finally:
            call.cancel()

    async def respond(self, invitation_id: str, *, accept: bool) -> InvitationState:
        """Answers an invitation and returns where it stands then."""
        request = work_service_pb2.RespondToInvitationRequest(invitation_id=invitation_id, accept=accept)
        with rpc_errors():
            response = await self._stub.RespondToInvitation(request)
        return convert.invitation_state_from_proto(response.state)


async def _bounded(write: "Awaitable[None]") -> None:
    async with asyncio.timeout(IDLE_SECONDS):
        await write
