"""A mesh's servers in one process on one port."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from covey import context
from covey_coordinator.app import CoordinatorApp, CoordinatorSettings
from covey_diagnostics.app import DiagnosticsApp, DiagnosticsSettings
from covey_kit.errors import InvalidArgument, Reason
from covey_kit.folders import FolderLock
from covey_kit.serve import Host, ServeOptions, Service, run_until_signal
from covey_kit.tokens import SigningKey, Verifier
from covey_storage.app import StorageApp, StorageSettings

__all__ = ["UpOptions", "serve"]


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
        services: list[Service] = []
        try:
            services.append(await StorageApp.open(StorageSettings(folder=options.folder / "storage")))
            services.append(await DiagnosticsApp.open(DiagnosticsSettings()))
            coordinator = await CoordinatorApp.open(CoordinatorSettings(folder=home), key)
            services.append(coordinator)
            host = _host(services, Verifier([key.public_pem]), options)
            address = host.bind()
        except BaseException:
            for service in reversed(services):
                await service.close()
            raise
        coordinator.use_storage(address)

        def ready(bound: str) -> None:
            if options.remember:
                context.remember(bound, owner_token, options.folder)
            on_ready(bound, owner_token)

        try:
            await run_until_signal(host, ready)
        finally:
            if options.remember:
                context.forget(address, options.folder)


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
