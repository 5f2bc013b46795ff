"""A mesh's servers in one process on one port."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from covey import context
from covey_coordinator.app import CoordinatorApp, CoordinatorSettings
from covey_diagnostics.app import DiagnosticsApp, DiagnosticsSettings
from covey_kit.addresses import split
from covey_kit.caller import Role
from covey_kit.errors import InvalidArgument, Reason
from covey_kit.folders import FolderLock
from covey_kit.serve import Host, ServeOptions, Service, run_until_signal
from covey_kit.tokens import SigningKey, Verifier, write_secret
from covey_storage.app import StorageApp, StorageSettings

__all__ = ["UpOptions", "serve"]

OWNER_TOKEN_SECONDS = 365 * 86400.0
"""How long the owner's token lasts; each start writes a new one."""


@dataclass(frozen=True)
class UpOptions:
    """Where to listen and where state goes.

    Attributes:
        host: address to listen on.
        port: 0: the system chooses.
        folder: state of all services, each in a folder of its own below.
        tls_cert: PEM certificate chain.
        tls_key: PEM private key.
        insecure: allow plain text beyond loopback.
        remember: make this the coordinator that other commands of this user talk to.
    """

    host: str
    port: int
    folder: Path
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    remember: bool = True


async def serve(options: UpOptions, on_ready: Callable[[str, Path], None]) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        options: where.
        on_ready: called with the address and the owner's token file once the port answers.

    Raises:
        FailedPrecondition: another process has the folder.
        InvalidArgument: beyond loopback without TLS and without `insecure`.
        OSError: the port is taken, or the folder can't be written.
    """
    with FolderLock(options.folder):
        home = options.folder / "coordinator"
        key = SigningKey.load_or_create(home / "signing-key.pem")
        owner_token = home / "owner.token"
        verifier = Verifier([key.public_pem])
        services: list[Service] = []
        try:
            storage = await StorageApp.open(StorageSettings(folder=options.folder / "storage"))
            services.append(storage)
            services.append(await DiagnosticsApp.open(DiagnosticsSettings()))
            coordinator = await CoordinatorApp.open(CoordinatorSettings(folder=home), key)
            services.append(coordinator)
            write_secret(owner_token, key.issue("owner", Role.OWNER, OWNER_TOKEN_SECONDS).encode())
            host = _host(services, verifier, options)
            inside = Host([_Shared(storage)], verifier, ServeOptions()) if options.tls_cert else None
            address = _reachable(host.bind())
        except BaseException:
            for service in reversed(services):
                await service.close()
            raise
        # The coordinator calls storage through a port: this one, or with TLS another that is loopback only,
        # since the certificate needn't name this machine as it names itself.
        coordinator.use_storage(address if inside is None else inside.bind())

        def ready(_bound: str) -> None:
            if options.remember:
                context.remember(address, owner_token, options.folder, options.tls_cert)
            on_ready(address, owner_token)

        try:
            if inside is not None:
                await inside.start()
            await run_until_signal(host, ready)
        finally:
            if inside is not None:
                await inside.stop(grace=0)
            if options.remember:
                context.forget(address, options.folder)


class _Shared:
    """A service that another host starts and closes."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.service_names = service.service_names

    def register(self, server: grpc.aio.Server) -> None:
        self._service.register(server)

    async def start(self) -> None:
        pass

    async def drain(self) -> None:
        pass

    async def close(self) -> None:
        pass


def _reachable(address: str) -> str:
    """Returns where this machine reaches what listens on `address`, which may be all its interfaces."""
    host, port = split(address)
    return f"127.0.0.1:{port}" if host in {"0.0.0.0", "::"} else address  # noqa: S104 - compared, not bound


def _host(services: list[Service], verifier: Verifier, options: UpOptions) -> Host:
    try:
        return Host(
            services,
            verifier,
            ServeOptions(
                host=options.host,
                port=options.port,
                tls_cert=options.tls_cert,
                tls_key=options.tls_key,
                insecure=options.insecure,
            ),
        )
    except ValueError as error:
        raise InvalidArgument(Reason.INVALID_FIELD, str(error)) from error
