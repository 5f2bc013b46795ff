"""Sends snapshots to diagnostics. It never stands in the way of work: what can't be sent is dropped."""

import asyncio
import contextlib
from collections.abc import Callable

import grpc.aio
import structlog

from covey.v1 import diagnostics_service_pb2, diagnostics_service_pb2_grpc, snapshot_pb2
from covey_kit.errors import CoveyError
from covey_kit.status import rpc_errors
from covey_participant.domain.backoff import Backoff

log = structlog.get_logger(__name__)

INTERVAL_SECONDS = 2.0
LEAST_GAP_SECONDS = 0.05
WRITE_SECONDS = 10.0


class SnapshotReporter:
    """Keeps a stream open, sends a snapshot every 2 s and at each change of stage, and reconnects quietly.

    Args:
        channel: returns the channel to diagnostics that holds now; None: not connected yet.
        take: makes the snapshot of this moment.
        backoff: waits between tries.
    """

    def __init__(
        self,
        channel: Callable[[], grpc.aio.Channel | None],
        take: Callable[[], snapshot_pb2.Snapshot],
        backoff: Backoff,
    ) -> None:
        self._channel = channel
        self._take = take
        self._backoff = backoff
        self._changed = asyncio.Event()

    def poke(self) -> None:
        """Says that the stage changed."""
        self._changed.set()

    async def run(self) -> None:
        """Reports until cancelled."""
        while True:
            channel = self._channel()
            if channel is not None:
                try:
                    with rpc_errors():
                        await self._stream(channel)
                except CoveyError as error:
                    log.debug("snapshots aren't taken; trying again", message=error.message)
                except TimeoutError:
                    log.debug("snapshots aren't taken; trying again", message="the stream is stuck")
                except Exception:  # work must go on, and be shown again when it can
                    log.exception("snapshots can't be made")
            await asyncio.sleep(self._backoff.next())

    async def _stream(self, channel: grpc.aio.Channel) -> None:
        call = diagnostics_service_pb2_grpc.DiagnosticsServiceStub(channel).ReportSnapshots()
        try:
            while not call.done() and channel is self._channel():
                self._changed.clear()
                request = diagnostics_service_pb2.ReportSnapshotsRequest(snapshot=self._take())
                try:
                    async with asyncio.timeout(WRITE_SECONDS):
                        await call.write(request)
                except asyncio.InvalidStateError:
                    break
                self._backoff.reset()
                await asyncio.sleep(LEAST_GAP_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_SECONDS):
                        await self._changed.wait()
            if call.done():
                await call
        finally:
            call.cancel()
