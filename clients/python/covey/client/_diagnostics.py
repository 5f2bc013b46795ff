"""What each device is doing now."""

from collections.abc import AsyncIterator

from covey.client._connection import Connection
from covey.v1 import diagnostics_service_pb2 as pb
from covey.v1 import diagnostics_service_pb2_grpc as pb_grpc
from covey_kit.errors import NotFound, Reason

__all__ = ["Diagnostics"]


class Diagnostics:
    """The newest snapshot of every participant."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def list(self, job_id: str = "") -> list[pb.ParticipantExecution]:
        """Returns the newest snapshot of each participant by its id, or of those that work for one job."""
        stub = pb_grpc.DiagnosticsServiceStub(await self._connection.diagnostics())
        request = pb.ListParticipantExecutionsRequest(job_id=job_id, page_size=1000)
        found: list[pb.ParticipantExecution] = []
        while True:
            with self._connection.calls():
                page = await stub.ListParticipantExecutions(request)
            found += page.executions
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def get(self, participant_id: str) -> pb.ParticipantExecution:
        """Returns the newest snapshot of one participant.

        Raises:
            NotFound: PARTICIPANT_NOT_FOUND, it never sent one.
        """
        for one in await self.list():
            if one.snapshot.participant_id == participant_id:
                return one
        raise NotFound(
            Reason.PARTICIPANT_NOT_FOUND,
            f"{participant_id} has sent no snapshot; see who has with: covey diag ls",
            resource=("participant", participant_id),
        )

    async def watch(self, job_id: str = "") -> AsyncIterator[dict[str, pb.ParticipantExecution]]:
        """Yields everyone's newest snapshot by participant id, and again at every change."""
        stub = pb_grpc.DiagnosticsServiceStub(await self._connection.diagnostics())
        present: dict[str, pb.ParticipantExecution] = {}
        with self._connection.calls():
            async for message in stub.WatchSnapshots(pb.WatchSnapshotsRequest(job_id=job_id)):
                present |= {one.snapshot.participant_id: one for one in message.executions}
                yield dict(sorted(present.items()))
