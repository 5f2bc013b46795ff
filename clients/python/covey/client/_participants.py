"""Who joined, and who is invited."""

from collections.abc import Sequence
from typing import TypeAlias

from covey.client._connection import Connection
from covey.v1 import coordinator_service_pb2 as pb
from covey.v1 import coordinator_service_pb2_grpc as pb_grpc
from covey.v1 import job_pb2

__all__ = ["Participants"]

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

    async def revoke(self, invitation_id: str) -> job_pb2.Job:
        """Takes an invitation back and returns the job.

        Raises:
            NotFound: no such invitation.
        """
        with self._connection.calls():
            return (
                await self._stub.RevokeInvitation(pb.RevokeInvitationRequest(invitation_id=invitation_id))
            ).job
