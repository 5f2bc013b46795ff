"""Diagnostics, put together."""

from dataclasses import dataclass
from typing import Self

import grpc.aio

from covey.v1 import diagnostics_service_pb2_grpc, snapshot_pb2
from covey_diagnostics.domain import Executions
from covey_diagnostics.transport import DiagnosticsServicer
from covey_kit.clock import SystemClock

__all__ = ["DiagnosticsApp", "DiagnosticsSettings"]


@dataclass(frozen=True)
class DiagnosticsSettings:
    """Nothing can be set yet: the newest snapshots are kept in memory."""


class DiagnosticsApp:
    """The diagnostics service, to be served by `covey_kit.serve.Host`."""

    service_names = ("covey.v1.DiagnosticsService",)

    def __init__(self, settings: DiagnosticsSettings) -> None:
        self.settings = settings
        executions: Executions[snapshot_pb2.Snapshot] = Executions()
        self._servicer = DiagnosticsServicer(executions, SystemClock())

    @classmethod
    async def open(cls, settings: DiagnosticsSettings) -> Self:
        """Makes the service."""
        return cls(settings)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        diagnostics_service_pb2_grpc.add_DiagnosticsServiceServicer_to_server(self._servicer, server)

    async def start(self) -> None:
        """Nothing to recover."""

    async def drain(self) -> None:
        """Ends the watch streams."""
        await self._servicer.drain()

    async def close(self) -> None:
        """Nothing to release."""
