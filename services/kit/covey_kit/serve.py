"""Serves services on a port, with everything that every Covey port has."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from covey.v1 import server_service_pb2, server_service_pb2_grpc
from covey_kit.addresses import is_loopback
from covey_kit.interceptor import ContractInterceptor
from covey_kit.limits import BULK_BYTES, MESSAGE_BYTES, WINDOW_BYTES
from covey_kit.tokens import Verifier
from covey_kit.version import CONTRACT_VERSION, program_version

__all__ = ["Host", "ServeOptions", "Service", "run_until_signal"]

log = structlog.get_logger()

_SERVER_SERVICE = "covey.v1.ServerService"


class Service(Protocol):
    """What a service's app gives to be served."""

    @property
    def service_names(self) -> Sequence[str]:
        """Full gRPC names, such as `covey.v1.StorageService`."""
        ...

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers."""
        ...

    async def start(self) -> None:
        """Recovers and starts background tasks. The port opens afterwards."""
        ...

    async def drain(self) -> None:
        """Tells open streams that the server stops. Bounded to a few seconds."""
        ...

    async def close(self) -> None:
        """Releases everything. May be called twice."""
        ...


@dataclass(frozen=True)
class ServeOptions:
    """Where and how to listen.

    Attributes:
        host: address to listen on.
        port: 0 lets the system choose.
        tls_cert: PEM certificate chain; with `tls_key` the port is TLS.
        tls_key: PEM private key.
        insecure: allow plain text beyond loopback.
        storage_address: told to callers of GetServerInfo; empty: this address.
        diagnostics_address: told to callers of GetServerInfo; empty: this address.
        blob_bytes: told to callers of GetServerInfo.
    """

    host: str = "127.0.0.1"
    port: int = 0
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    storage_address: str = ""
    diagnostics_address: str = ""
    blob_bytes: int = 1 << 40


class ServerServicer(server_service_pb2_grpc.ServerServiceServicer):
    """Says what is served on the port and within which limits."""

    def __init__(self, names: Sequence[str], options: ServeOptions) -> None:
        self._names = names
        self._options = options

    async def GetServerInfo(
        self, request: server_service_pb2.GetServerInfoRequest, context: Any
    ) -> server_service_pb2.GetServerInfoResponse:
        return server_service_pb2.GetServerInfoResponse(
            contract_version=CONTRACT_VERSION,
            program_version=program_version(),
            services=self._names,
            limits=server_service_pb2.ServerLimits(
                message_bytes=MESSAGE_BYTES,
                bulk_message_bytes=BULK_BYTES,
                blob_bytes=self._options.blob_bytes,
            ),
            storage_address=self._options.storage_address,
            diagnostics_address=self._options.diagnostics_address,
        )


class Host:
    """A port with services on it, and health, reflection and `ServerService` beside them.

    Args:
        services: served here; started in this order, closed in reverse.
        verifier: says whose tokens count.
        options: where and how to listen.

    Raises:
        ValueError: beyond loopback without TLS and without `insecure`; or only half of a TLS pair.
    """

    def __init__(self, services: Sequence[Service], verifier: Verifier, options: ServeOptions) -> None:
        _check_exposure(options)
        self._services = services
        self._options = options
        self._names = [_SERVER_SERVICE, *(name for service in services for name in service.service_names)]
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[ContractInterceptor(verifier)],
            options=[
                # A second process on the same port is a mistake, not load balancing.
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", MESSAGE_BYTES),
                ("grpc.max_send_message_length", MESSAGE_BYTES),
                ("grpc.keepalive_time_ms", 20_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.server.max_pending_requests", 10_000),
                ("grpc.server.max_pending_requests_hard_limit", 20_000),
                # What a stream that isn't read fast enough holds: left to itself, gRPC takes 22 MB for each.
                ("grpc.http2.bdp_probe", 0),
                ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
            ],
        )
        self.address = ""
        """`HOST:PORT` once started."""
        self._stopped = False

    def bind(self) -> str:
        """Takes the port without answering on it yet, and returns the address.

        Raises:
            OSError: the port is taken, or the host isn't this machine's.
        """
        host = f"[{self._options.host}]" if ":" in self._options.host else self._options.host
        wanted = f"{host}:{self._options.port}"
        try:
            if self._options.tls_cert and self._options.tls_key:
                pair = (self._options.tls_key.read_bytes(), self._options.tls_cert.read_bytes())
                port = self._server.add_secure_port(wanted, grpc.ssl_server_credentials([pair]))
            else:
                port = self._server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise OSError(
                f"can't listen on {wanted}: the port is taken, or the address isn't this machine's; "
                "choose another with --listen HOST:PORT (port 0 picks a free one)"
            ) from error
        self.address = f"{host}:{port}"
        return self.address

    async def start(self) -> str:
        """Starts the services, then opens the port; returns the address."""
        if not self.address:
            self.bind()
        started = []
        try:
            for service in self._services:
                service.register(self._server)
                started.append(service)
                await service.start()
        except BaseException:
            for service in reversed(started):
                await service.close()
            await self._server.stop(None)
            raise
        server_service_pb2_grpc.add_ServerServiceServicer_to_server(
            ServerServicer(self._names, self._options), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        served = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(served, self._server)
        for name in ("", *self._names):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        await self._server.start()
        return self.address

    async def stop(self, grace: float = 5.0) -> None:
        """Says NOT_SERVING, drains the services, ends calls still open after `grace` seconds, closes all."""
        if self._stopped:
            return
        self._stopped = True
        await self._health.enter_graceful_shutdown()
        await asyncio.gather(*(service.drain() for service in self._services), return_exceptions=True)
        await self._server.stop(grace)
        for service in reversed(self._services):
            await service.close()


def _check_exposure(options: ServeOptions) -> None:
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ValueError("TLS needs both --tls-cert and --tls-key; only one was given")
    if not is_loopback(options.host) and options.tls_cert is None and not options.insecure:
        raise ValueError(
            f"listening on {options.host} without TLS would send tokens in plain text; give --tls-cert and "
            "--tls-key, listen on 127.0.0.1, or say --insecure if the network is your own"
        )


async def run_until_signal(host: Host, on_ready: Callable[[str], None]) -> None:
    """Serves until SIGINT or SIGTERM, then stops with grace; a second signal stops at once.

    Args:
        host: what to serve.
        on_ready: called with the address once the port answers.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = 0

    def on_signal() -> None:
        nonlocal signals
        signals += 1
        stop.set()
        if signals > 1 and task is not None:
            task.cancel()

    task = asyncio.current_task()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        address = await host.start()
        on_ready(address)
        await stop.wait()
        log.info("stopping", address=address)
    except asyncio.CancelledError:
        await host.stop(grace=0)
        return
    finally:
        await host.stop()
