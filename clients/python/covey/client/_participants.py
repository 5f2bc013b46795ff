"""Who joined, and who is invited."""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from covey.client._connection import Connection
from covey.v1 import coordinator_service_pb2 as pb
from covey.v1 import coordinator_service_pb2_grpc as pb_grpc
from covey.v1 import job_pb2
from covey_kit.errors import DeadlineExceeded, Reason

__all__ = ["Participants"]

ANSWER_SECONDS, ANSWER_POLL_SECONDS = 60.0, 0.1

ParticipantList: TypeAlias = list[job_pb2.Participant]
"""In the class, `list` is the method."""


class Participants:
    """The devices of the mesh."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._stub = pb_grpc.CoordinatorServiceStub(connection.coordinator)

    async def list(self, *, connected_only: bool = False) -> ParticipantList:
        """Returns every device that ever joined (or those connected now), by id."""
        found: list[job_pb2.Participant] = []
        request = pb.ListParticipantsRequest(connected_only=connected_only, page_size=1000)
        while True:
            with self._connection.calls():
                page = await self._stub.ListParticipants(request)
            found += page.participants
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def invite(
        self, job_id: str, participant_ids: Sequence[str] = (), *, all_connected: bool = False
    ) -> job_pb2.Job:
        """Invites participants, or everyone who is connected now, and returns the job with its invitations.

        Raises:
            NotFound: no such job, or unknown participants (all are named; nobody was invited).
            FailedPrecondition: the job has ended.
        """
        request = pb.InviteParticipantsRequest(
            job_id=job_id, participant_ids=participant_ids, all_connected=all_connected
        )
        with self._connection.calls():
            return (await self._stub.InviteParticipants(request)).job

    async def accepted(self, job_id: str, at_least: int, *, timeout: float = ANSWER_SECONDS) -> job_pb2.Job:
        """Waits until so many participants have accepted the job, and returns it.

        Raises:
            NotFound: no such job.
            DeadlineExceeded: fewer had after `timeout` seconds; who didn't answer is named.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        while True:
            with self._connection.calls():
                job = (await self._stub.GetJob(pb.GetJobRequest(job_id=job_id))).job
            found = sum(one.invitation == job_pb2.INVITATION_STATE_ACCEPTED for one in job.participants)
            if found >= at_least:
                return job
            if clock() >= deadline:
                silent = [
                    one.display_name or one.participant_id
                    for one in job.participants
                    if one.invitation == job_pb2.INVITATION_STATE_PENDING
                ]
                raise DeadlineExceeded(
                    Reason.DEADLINE,
                    f"{found} of {at_least} participants accepted {job_id} in {timeout:.0f} s; not answered: "
                    f"{', '.join(silent) or 'nobody'}",
                )
            await asyncio.sleep(ANSWER_POLL_SECONDS)

    async def revoke(self, invitation_id: str) -> job_pb2.Job:
        """Takes an invitation back and returns the job.

        Raises:
            NotFound: no such invitation.
        """
        with self._connection.calls():
            return (
                await self._stub.RevokeInvitation(pb.RevokeInvitationRequest(invitation_id=invitation_id))
            ).job
