"""The gRPC edge of diagnostics."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from covey.v1 import diagnostics_service_pb2 as pb
from covey.v1 import diagnostics_service_pb2_grpc, snapshot_pb2
from covey_diagnostics.convert import execution_to_proto, order_from_proto
from covey_diagnostics.domain import Executions
from covey_kit.caller import current_caller
from covey_kit.clock import Clock
from covey_kit.errors import InvalidArgument, PermissionDenied, Reason, Unavailable

__all__ = ["DiagnosticsServicer"]

_PAGE = 100
_COALESCE_SECONDS = 0.1


class DiagnosticsServicer(diagnostics_service_pb2_grpc.DiagnosticsServiceServicer):
    """Takes snapshots in and shows the newest of each participant."""

    def __init__(self, executions: Executions[snapshot_pb2.Snapshot], clock: Clock) -> None:
        self._executions = executions
        self._clock = clock
        self._changed = asyncio.Condition()
        self._changes = 0
        self._draining = asyncio.Event()

    async def drain(self) -> None:
        """Ends the watch streams."""
        self._draining.set()
        await self._notify()

    async def _notify(self) -> None:
        self._changes += 1
        async with self._changed:
            self._changed.notify_all()

    async def ReportSnapshots(
        self, request_iterator: AsyncIterator[pb.ReportSnapshotsRequest], context: Any
    ) -> pb.ReportSnapshotsResponse:
        """Takes a participant's snapshots for as long as its stream lasts."""
        participant_id = current_caller().subject
        response = pb.ReportSnapshotsResponse()
        self._executions.opened(participant_id)
        try:
            async for request in request_iterator:
                if self._accept(participant_id, request.snapshot):
                    response.accepted += 1
                    await self._notify()
                else:
                    response.dropped += 1
        finally:
            self._executions.closed(participant_id)
            await self._notify()
        return response

    def _accept(self, participant_id: str, snapshot: snapshot_pb2.Snapshot) -> bool:
        if snapshot.participant_id != participant_id:
            raise PermissionDenied(
                Reason.ROLE_FORBIDDEN,
                f"the token is {participant_id}'s; it can't report for {snapshot.participant_id}",
            )
        return self._executions.accept(
            participant_id,
            snapshot,
            order_from_proto(snapshot),
            job_id=snapshot.job_id if snapshot.HasField("job_id") else None,
            now=self._clock.now(),
            monotonic=self._clock.monotonic(),
        )

    def _present(self, job_id: str) -> dict[str, pb.ParticipantExecution]:
        monotonic = self._clock.monotonic()
        return {
            execution.participant_id: execution_to_proto(execution, monotonic)
            for execution in self._executions.all(job_id or None)
        }

    async def WatchSnapshots(
        self, request: pb.WatchSnapshotsRequest, context: Any
    ) -> AsyncIterator[pb.WatchSnapshotsResponse]:
        """Sends the present state, then every change; what changed while a reader was slow is sent once."""
        shown: dict[str, pb.ParticipantExecution] = {}
        first = True
        while not self._draining.is_set():
            known = self._changes  # what changes while a reader takes its time isn't missed
            present = self._present(request.job_id)
            changed = [execution for key, execution in present.items() if shown.get(key) != execution]
            if changed or first:
                yield pb.WatchSnapshotsResponse(executions=changed)
            shown, first = present, False
            await self._next_change(known)
        raise Unavailable(
            Reason.SHUTTING_DOWN, "diagnostics is shutting down; watch again later", retry_after=1.0
        )

    async def _next_change(self, known: int) -> None:
        timeout = self._executions.next_change(self._clock.monotonic())
        try:
            async with asyncio.timeout(timeout), self._changed:
                await self._changed.wait_for(lambda: self._changes != known)
            # What a thousand participants report within this time travels together.
            await asyncio.sleep(_COALESCE_SECONDS)
        except TimeoutError:
            return

    async def ListParticipantExecutions(
        self, request: pb.ListParticipantExecutionsRequest, context: Any
    ) -> pb.ListParticipantExecutionsResponse:
        """Lists the newest snapshot of each participant by its id; the token is the last id shown."""
        after = _page_start(request.page_token)
        size = request.page_size or _PAGE
        left = [e for key, e in self._present(request.job_id).items() if key > after]
        page = left[:size]
        more = len(left) > size
        return pb.ListParticipantExecutionsResponse(
            executions=page,
            next_page_token=f"after:{page[-1].snapshot.participant_id}" if more else "",
        )


def _page_start(token: str) -> str:
    if not token:
        return ""
    prefix, colon, after = token.partition(":")
    if prefix != "after" or not colon or not after:
        raise InvalidArgument(
            Reason.PAGE_TOKEN, "page_token: not one that this server made; begin again without it"
        )
    return after
