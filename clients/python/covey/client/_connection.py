"""The channels of one client, and its errors in words that name what was tried."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

from covey.context import Server
from covey.v1 import server_service_pb2, server_service_pb2_grpc
from covey_kit.channel import connect as open_channel
from covey_kit.errors import FailedPrecondition, Reason, Unauthenticated, Unavailable
from covey_kit.status import rpc_errors
from covey_kit.version import CONTRACT_VERSION, compatible

__all__ = ["Connection", "never_answered"]


def never_answered(error: Unavailable) -> bool:
    """Says whether the call got no answer from a Covey server: no connection, or a broken one."""
    cause = error.__cause__
    if not isinstance(cause, grpc.aio.AioRpcError):
        return False
    return all(key != "grpc-status-details-bin" for key, _ in cause.trailing_metadata() or ())


class Connection:
    """A coordinator, the storage that it names, and the token for both."""

    def __init__(self, server: Server, token: str | None, root_cert: Path | None) -> None:
        self.server = server
        self._token = token
        self._root_cert = root_cert
        self.coordinator = open_channel(server.address, token, root_cert=root_cert)
        self._others: dict[str, grpc.aio.Channel] = {}
        self.info: server_service_pb2.GetServerInfoResponse | None = None

    async def open(self) -> server_service_pb2.GetServerInfoResponse:
        """Asks the coordinator what it serves. Once: later calls return the same answer.

        Raises:
            Unavailable: nobody answers there.
            FailedPrecondition: CONTRACT_VERSION, or what answers isn't a coordinator.
        """
        if self.info is not None:
            return self.info
        stub = server_service_pb2_grpc.ServerServiceStub(self.coordinator)
        with self.calls():
            info = await stub.GetServerInfo(server_service_pb2.GetServerInfoRequest())
        if not compatible(info.contract_version):
            raise FailedPrecondition(
                Reason.CONTRACT_VERSION,
                f"{self.server.address} speaks contract {info.contract_version or 'unknown'}, this program "
                f"{CONTRACT_VERSION}; use the same major version on both sides",
            )
        if "covey.v1.CoordinatorService" not in info.services:
            raise FailedPrecondition(
                Reason.NOT_IMPLEMENTED,
                f"what answers at {self.server.address} is no coordinator; it serves "
                f"{', '.join(info.services)}",
            )
        self.info = info
        return info

    async def storage(self) -> grpc.aio.Channel:
        """Returns the channel to storage: the coordinator's own when it names no other."""
        return self._channel((await self.open()).storage_address)

    async def diagnostics(self) -> grpc.aio.Channel:
        """Returns the channel to diagnostics: the coordinator's own when it names no other.

        Raises:
            FailedPrecondition: NOT_IMPLEMENTED, this mesh has no diagnostics.
        """
        info = await self.open()
        if not info.diagnostics_address and "covey.v1.DiagnosticsService" not in info.services:
            raise FailedPrecondition(
                Reason.NOT_IMPLEMENTED,
                f"the coordinator at {self.server.address} names no diagnostics service; start "
                "covey-diagnostics and tell the coordinator its address",
            )
        return self._channel(info.diagnostics_address)

    def _channel(self, address: str) -> grpc.aio.Channel:
        if not address or address == self.server.address:
            return self.coordinator
        if address not in self._others:
            self._others[address] = open_channel(address, self._token, root_cert=self._root_cert)
        return self._others[address]

    async def close(self) -> None:
        """Closes the channels."""
        await self.coordinator.close()
        for channel in self._others.values():
            await channel.close()

    @contextmanager
    def calls(self, *, storage: bool = False) -> Iterator[None]:
        """Turns what gRPC raises into `CoveyError`s that name the address and the token's file.

        Args:
            storage: whether the calls inside go to storage; else to the coordinator.
        """
        where, what = self.server.address, "coordinator"
        origin, advice = self.server.origin, "start one with `covey up`, or name another with --coordinator"
        if storage and self.info is not None and self.info.storage_address not in {"", where}:
            origin = f"named by the coordinator at {where}"
            where, what, advice = self.info.storage_address, "storage", "start it again"
        try:
            with rpc_errors():
                yield
        except Unavailable as error:
            if not never_answered(error):
                raise
            raise Unavailable(
                error.reason,
                f"no {what} answers at {where} ({origin}); {advice}",
                metadata={"address": where},
                retry_after=error.retry_after,
            ) from error.__cause__
        except Unauthenticated as error:
            file = self.server.token_file
            used = (
                f"the token of {file}"
                if file
                else "no token, because no token file is known for this address"
            )
            raise Unauthenticated(
                error.reason,
                f"{where} refused the caller: {error.message} (used: {used}; --token-file names another)",
                metadata=error.metadata,
            ) from error.__cause__
