"""`CoordinatorService`: the owners' side."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from covey.v1 import (
    checkpoint_pb2,
    common_pb2,
    coordinator_service_pb2,
    coordinator_service_pb2_grpc,
    job_pb2,
)
from covey_coordinator.convert.job import (
    continuation_from_proto,
    job_state_from_proto,
    job_to_proto,
    new_job_from_proto,
    participant_to_proto,
    round_to_proto,
)
from covey_coordinator.domain.invitations import Invitations
from covey_coordinator.domain.jobs import JobCommands
from covey_coordinator.domain.lifecycle import Command
from covey_coordinator.domain.queries import Queries
from covey_coordinator.domain.view import view_job
from covey_coordinator.domain.world import JobSight, World
from covey_kit.errors import NotFound, Reason

__all__ = ["Archive", "CoordinatorServicer"]

_pb = coordinator_service_pb2
_PAGE = 100
_WATCH_INTERVAL = 0.1
"""Seconds between two states of a watched job, at least."""


class Archive(Protocol):
    """Where files and checkpoints are."""

    async def get_checkpoint(self, job_id: str, round_number: int) -> checkpoint_pb2.Checkpoint:
        """Returns a recorded checkpoint."""

    async def list_checkpoints(
        self, job_id: str, page_size: int, page_token: str
    ) -> tuple[Sequence[checkpoint_pb2.Checkpoint], str]:
        """Returns a page of recorded checkpoints and the next page's token."""

    def read(self, sha256: str) -> AsyncIterator[bytes]:
        """Yields a blob's bytes."""


class CoordinatorServicer(coordinator_service_pb2_grpc.CoordinatorServiceServicer):
    """Hands calls of owners to the domain."""

    def __init__(
        self,
        world: World,
        jobs: JobCommands,
        invitations: Invitations,
        queries: Queries,
        archive: Archive,
    ) -> None:
        self._world = world
        self._jobs = jobs
        self._invitations = invitations
        self._queries = queries
        self._archive = archive

    def _job(self, sight: JobSight) -> job_pb2.Job:
        return job_to_proto(view_job(self._world, sight))

    async def CreateJob(self, request: _pb.CreateJobRequest, context: Any) -> _pb.CreateJobResponse:
        new = await asyncio.to_thread(lambda: new_job_from_proto(request, _fingerprint(request)))
        return _pb.CreateJobResponse(job=self._job(await self._jobs.create(new)))

    async def ContinueJob(self, request: _pb.ContinueJobRequest, context: Any) -> _pb.ContinueJobResponse:
        wanted = await asyncio.to_thread(lambda: continuation_from_proto(request, _fingerprint(request)))
        return _pb.ContinueJobResponse(job=self._job(await self._jobs.continue_(wanted)))

    async def GetJob(self, request: _pb.GetJobRequest, context: Any) -> _pb.GetJobResponse:
        return _pb.GetJobResponse(job=self._job(await self._jobs.sight(request.job_id)))

    async def ListJobs(self, request: _pb.ListJobsRequest, context: Any) -> _pb.ListJobsResponse:
        states = [job_state_from_proto(state) for state in request.states if state]
        sights, token = await self._queries.jobs(request.page_size or _PAGE, request.page_token, states)
        return _pb.ListJobsResponse(jobs=[self._job(sight) for sight in sights], next_page_token=token)

    async def WatchJob(self, request: _pb.WatchJobRequest, context: Any) -> None:
        async for sight in self._queries.watch(request.job_id, _WATCH_INTERVAL):
            await context.write(_pb.WatchJobResponse(job=self._job(sight)))

    async def ListRounds(self, request: _pb.ListRoundsRequest, context: Any) -> _pb.ListRoundsResponse:
        rounds, token = await self._queries.rounds(
            request.job_id, request.page_size or _PAGE, request.page_token
        )
        return _pb.ListRoundsResponse(rounds=[round_to_proto(r) for r in rounds], next_page_token=token)

    async def StartJob(self, request: _pb.StartJobRequest, context: Any) -> _pb.StartJobResponse:
        return _pb.StartJobResponse(job=self._job(await self._jobs.command(request.job_id, Command.START)))

    async def PauseJob(self, request: _pb.PauseJobRequest, context: Any) -> _pb.PauseJobResponse:
        return _pb.PauseJobResponse(job=self._job(await self._jobs.command(request.job_id, Command.PAUSE)))

    async def ResumeJob(self, request: _pb.ResumeJobRequest, context: Any) -> _pb.ResumeJobResponse:
        return _pb.ResumeJobResponse(job=self._job(await self._jobs.command(request.job_id, Command.RESUME)))

    async def StopJob(self, request: _pb.StopJobRequest, context: Any) -> _pb.StopJobResponse:
        return _pb.StopJobResponse(job=self._job(await self._jobs.command(request.job_id, Command.STOP)))

    async def DeleteJob(self, request: _pb.DeleteJobRequest, context: Any) -> _pb.DeleteJobResponse:
        await self._jobs.delete(request.job_id)
        return _pb.DeleteJobResponse()

    async def ListParticipants(
        self, request: _pb.ListParticipantsRequest, context: Any
    ) -> _pb.ListParticipantsResponse:
        members, token = self._queries.participants(
            request.page_size or _PAGE, request.page_token, connected_only=request.connected_only
        )
        jobs = await self._queries.accepted([member.record.participant_id for member in members])
        found = [participant_to_proto(m, jobs.get(m.record.participant_id, [])) for m in members]
        return _pb.ListParticipantsResponse(participants=found, next_page_token=token)

    async def InviteParticipants(
        self, request: _pb.InviteParticipantsRequest, context: Any
    ) -> _pb.InviteParticipantsResponse:
        sight = await self._invitations.invite(
            request.job_id, list(request.participant_ids), all_connected=request.all_connected
        )
        return _pb.InviteParticipantsResponse(job=self._job(sight))

    async def RevokeInvitation(
        self, request: _pb.RevokeInvitationRequest, context: Any
    ) -> _pb.RevokeInvitationResponse:
        job_id = await self._invitations.revoke(request.invitation_id)
        return _pb.RevokeInvitationResponse(job=self._job(await self._jobs.sight(job_id)))

    async def RunValidation(
        self, request: _pb.RunValidationRequest, context: Any
    ) -> _pb.RunValidationResponse:
        number = request.round if request.HasField("round") else None
        answer = await self._jobs.validate_round(request.job_id, number)
        return _pb.RunValidationResponse(round=answer.round, done=answer.done)

    async def ListCheckpoints(
        self, request: _pb.CoordinatorServiceListCheckpointsRequest, context: Any
    ) -> _pb.CoordinatorServiceListCheckpointsResponse:
        await self._jobs.sight(request.job_id)
        checkpoints, token = await self._archive.list_checkpoints(
            request.job_id, request.page_size or _PAGE, request.page_token
        )
        return _pb.CoordinatorServiceListCheckpointsResponse(checkpoints=checkpoints, next_page_token=token)

    async def ExportModule(self, request: _pb.ExportModuleRequest, context: Any) -> None:
        module = (await self._queries.spec(request.job_id)).package.module
        blob = common_pb2.BlobRef(sha256=module.sha256, size_bytes=module.size)
        await context.write(_pb.ExportModuleResponse(blob=blob))
        async for data in self._archive.read(module.sha256):
            await context.write(_pb.ExportModuleResponse(data=data))

    async def ExportCheckpoint(self, request: _pb.ExportCheckpointRequest, context: Any) -> None:
        number = request.round if request.HasField("round") else None
        found = await self._queries.round(request.job_id, number)
        if found is None:
            which = f"of round {number}" if number is not None else "yet"
            raise NotFound(
                Reason.CHECKPOINT_NOT_FOUND,
                f"job {request.job_id} has no checkpoint {which}; list its checkpoints",
                resource=("checkpoint", f"{request.job_id}/{number if number is not None else 'latest'}"),
            )
        checkpoint = await self._archive.get_checkpoint(request.job_id, found.round)
        await context.write(_pb.ExportCheckpointResponse(checkpoint=checkpoint))
        async for data in self._archive.read(checkpoint.blob.sha256):
            await context.write(_pb.ExportCheckpointResponse(data=data))


def _fingerprint(request: _pb.CreateJobRequest | _pb.ContinueJobRequest) -> str:
    """Returns what tells one creation from another, whatever its request id."""
    copy = type(request).FromString(request.SerializeToString())
    copy.ClearField("request_id")
    copy.ClearField("validate_only")
    kind = request.DESCRIPTOR.full_name.encode()
    return hashlib.sha256(kind + copy.SerializeToString(deterministic=True)).hexdigest()
