"""Wires the participant: one device that belongs to one coordinator."""

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import structlog

from covey.v1 import participant_service_pb2, participant_service_pb2_grpc, snapshot_pb2
from covey_kit.caller import Role
from covey_kit.channel import connect
from covey_kit.clock import SystemClock
from covey_kit.folders import FolderLock
from covey_kit.serve import Host, ServeOptions
from covey_kit.tokens import SigningKey, Verifier, write_secret
from covey_participant import convert
from covey_participant.domain.backoff import Backoff
from covey_participant.domain.desk import Desk
from covey_participant.domain.device import DeviceControl
from covey_participant.domain.execution import Stage
from covey_participant.domain.values import (
    Adapter,
    Config,
    DeviceSettings,
    Identity,
    Package,
    Preference,
)
from covey_participant.runtime.abi import MOST_PAGES, PAGE
from covey_participant.runtime.cpu import DeviceLimits
from covey_participant.runtime.gpu.adapters import list_adapters
from covey_participant.runtime.gpu.runner import BackendRunner
from covey_participant.runtime.gpu.sizes import PlanSizes
from covey_participant.runtime.gpu.supervisor import GpuPool
from covey_participant.runtime.machine import cores, describe_machine
from covey_participant.runtime.module import RUNTIME
from covey_participant.runtime.pool import WorkerPool
from covey_participant.state import identity as identities
from covey_participant.state.adapters import AdaptersFile
from covey_participant.state.cache import DEFAULT_BYTES, BlobCache
from covey_participant.state.settings import SettingsFile
from covey_participant.transport.commands import DeskCommands
from covey_participant.transport.files import StorageFiles
from covey_participant.transport.participant_servicer import ParticipantServicer
from covey_participant.transport.session import Links, Session
from covey_participant.transport.snapshots import SnapshotReporter
from covey_participant.transport.work import WorkClient

log = structlog.get_logger(__name__)

GIVE_BACK_SECONDS = 0.8
CONTROL_TOKEN_SECONDS = 400 * 24 * 3600.0
CONTROL_TOKEN = "control.token"  # noqa: S105 - a file's name
CONTROL_ADDRESS = "control.address"


@dataclass(frozen=True)
class ParticipantSettings:
    """How a participant runs.

    Attributes:
        coordinator: its `HOST:PORT`.
        folder: what it keeps: identity, settings, cache. One process at a time.
        display_name: what people call it; empty: its id.
        participant_id: id for a new folder; empty: a random one.
        root_cert: PEM of the coordinator's root certificate; None: plain text.
        accept_all, preference, max_local_workers, gpu_memory_budget_mib: None: as they were set before.
        cache_bytes: bound of the blob cache.
        memory_bytes: most linear memory of a package; None: three quarters of the device's memory.
        step_seconds: longest call into a package that the device allows.
        control: where the local control service listens; None: it isn't served.
        find_adapters: looks for the GPUs that there are, best first; asked once, while the device joins.
    """

    coordinator: str
    folder: Path
    display_name: str = ""
    participant_id: str = ""
    root_cert: Path | None = None
    accept_all: bool | None = None
    preference: Preference | None = None
    max_local_workers: int | None = None
    gpu_memory_budget_mib: int | None = None
    cache_bytes: int = DEFAULT_BYTES
    memory_bytes: int | None = None
    step_seconds: float = 3600.0
    control: ServeOptions | None = field(default_factory=ServeOptions)
    find_adapters: Callable[[], Awaitable[Sequence[Adapter]]] = list_adapters


class ParticipantApp:
    """One device. `open` it, `run` it until cancelled or `stop`ped, `close` it.

    As a `Service` of the kit it is only what the local control port serves.
    """

    service_names: Sequence[str] = ("covey.v1.ParticipantService",)

    def __init__(self, settings: ParticipantSettings, lock: FolderLock, found: "_Found") -> None:
        self._settings = settings
        self._lock = lock
        self.identity = identity = found.identity
        self._started = time.time()
        self._sequence = 0
        self._clock = SystemClock()
        self._stop = asyncio.Event()
        self._stopped = False
        self._host: Host | None = None
        folder = settings.folder
        self._settings_file = SettingsFile(folder)
        self._cache = BlobCache(folder / "cache", settings.cache_bytes)
        self.pool = WorkerPool(cores())
        """Its worker processes."""
        self.gpu_pool = GpuPool(folder / "shaders")
        """The process that the GPU is used in."""
        self._gpu = _Gpu(PlanSizes(self._cache.path))
        self._device = describe_machine(found.adapters)
        self._links = Links(settings.coordinator, partial(_connect, settings.root_cert))
        self._client = WorkClient(self._links.coordinator, identity.participant_id)
        self.control = DeviceControl(
            settings=found.settings,
            save=self._save,
            device=lambda: self._device,
            answers=self._client,
            gpu=self._gpu,
        )
        self._reporter = SnapshotReporter(self._links.diagnostics, self.snapshot, _backoff(0.5, 10.0))
        self.desk = Desk(
            files=StorageFiles(self._cache, self._links.storage),
            runner=self._runner(),
            results=self._client,
            chooser=self.control,
            clock=self._clock,
            make_backoff=partial(_backoff, 0.2, 5.0),
            on_change=self._show,
        )
        """What is being worked on."""
        self._session = Session(
            self._links,
            identity=identity,
            display_name=settings.display_name,
            device=lambda: self._device,
            commands=DeskCommands(self.desk, self.control),
            backoff=_backoff(0.2, 10.0),
        )

    @classmethod
    async def open(cls, settings: ParticipantSettings) -> "ParticipantApp":
        """Takes the folder.

        Raises:
            FailedPrecondition: another process holds it, or its identity is damaged; named in the message.
            OSError: it can't be written.
        """
        lock = await asyncio.to_thread(FolderLock, settings.folder)
        try:
            return cls(settings, lock, await asyncio.to_thread(_find, settings))
        except BaseException:
            lock.release()
            raise

    # --- running ------------------------------------------------------------------------------

    async def run(self, on_ready: Callable[[str], None] | None = None) -> None:
        """Takes part until cancelled or stopped.

        Args:
            on_ready: called with the address of the local control service (empty: not served).

        Raises:
            PermissionDenied: `CREDENTIAL_MISMATCH`; FailedPrecondition: `CONTRACT_VERSION`.
        """
        await self._cache.open()
        address = await self._serve_control()
        if on_ready is not None:
            on_ready(address)
        background = [
            asyncio.create_task(self._reporter.run()),
            asyncio.create_task(self._warm_up()),
            asyncio.create_task(self._find_adapters()),
        ]
        session = asyncio.create_task(self._session.run())
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({session, stop}, return_when=asyncio.FIRST_COMPLETED)
            if session.done():
                session.result()
        finally:
            await self._wind_down([session, stop, *background])

    def stop(self) -> None:
        """Has `run` give the work back and end, within 2 s."""
        self._stop.set()

    async def _wind_down(self, tasks: "Sequence[asyncio.Task[Any]]") -> None:
        self.pool.interrupt()
        self.gpu_pool.interrupt()
        await self.desk.stop(GIVE_BACK_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.close()

    async def _warm_up(self) -> None:
        """Starts a worker before the first assignment comes: it takes 0.2 s."""
        try:
            await self.pool.warm_up()
        except Exception:
            log.exception("no worker process can be started yet; trying again with the first assignment")

    async def _find_adapters(self) -> None:
        """Looks for GPUs, in a process of its own; what needs to know waits for it, joining doesn't."""
        try:
            adapters = tuple(await self._settings.find_adapters())
            self._device = replace(self._device, adapters=adapters)
            names = [adapter.name for adapter in adapters]
            log.info("looked for GPUs", found=names or "none that this program can use")
            await asyncio.to_thread(AdaptersFile(self._settings.folder).save, adapters)
        except OSError as error:
            log.warning("what was found can't be kept for the next start", error=str(error))
        finally:
            self._gpu.known.set()
        self._show()

    def kill_now(self) -> None:
        """Sends SIGKILL to every worker without waiting."""
        self.pool.kill_now()
        self.gpu_pool.kill_now()

    async def _serve_control(self) -> str:
        options = self._settings.control
        if options is None:
            return ""
        folder = self._settings.folder
        key = await asyncio.to_thread(SigningKey.load_or_create, folder / "control-key.pem")
        token = key.issue(self.identity.participant_id, Role.OWNER, CONTROL_TOKEN_SECONDS)
        self._host = Host([self], Verifier([key.public_pem]), options)
        address = await self._host.start()
        await asyncio.to_thread(write_secret, folder / CONTROL_TOKEN, token.encode())
        await asyncio.to_thread(write_secret, folder / CONTROL_ADDRESS, address.encode())
        return address

    # --- the local control service ------------------------------------------------------------

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the control servicer."""
        servicer = ParticipantServicer(self.control, self.state)
        participant_service_pb2_grpc.add_ParticipantServiceServicer_to_server(servicer, server)

    async def start(self) -> None:
        """Nothing to recover: `run` does the work."""

    async def drain(self) -> None:
        """Watchers are cut with the port."""

    async def close(self) -> None:
        """Kills the workers, closes ports and channels, lets go of the folder. Idempotent."""
        if self._stopped:
            return
        self._stopped = True
        await self.pool.close()
        await self.gpu_pool.close()
        host, self._host = self._host, None
        if host is not None:
            await host.stop(grace=0)
            with contextlib.suppress(OSError):
                (self._settings.folder / CONTROL_ADDRESS).unlink()
        await self._links.close()
        self._lock.release()

    # --- showing ------------------------------------------------------------------------------

    def snapshot(self) -> snapshot_pb2.Snapshot:
        """Returns what the device is doing at this moment."""
        self._sequence += 1
        snapshot = snapshot_pb2.Snapshot(
            participant_id=self.identity.participant_id,
            sequence=self._sequence,
            run_start_time=convert.time_to_proto(self._started),
            time=convert.time_to_proto(self._clock.now()),
            stage=convert.stage_to_proto(Stage.IDLE),
            runtime=RUNTIME,
            max_workers=self.control.workers_allowed,
            gpu_memory_budget_mib=self.control.settings.gpu_memory_budget_mib,
        )
        if self._device.adapters:
            snapshot.adapter.CopyFrom(convert.adapter_to_proto(self._device.adapters[0]))
        execution = self.desk.execution
        if execution is not None:
            convert.execution_into_snapshot(execution, self._clock.monotonic(), snapshot)
        return snapshot

    def state(self) -> participant_service_pb2.ParticipantState:
        """Returns the device as it is now."""
        control = self.control
        state = participant_service_pb2.ParticipantState(
            participant_id=self.identity.participant_id,
            display_name=self._settings.display_name or self.identity.participant_id,
            coordinator_address=self._settings.coordinator,
            connected=control.connected,
            disconnected_reason=control.disconnected_reason,
            snapshot=self.snapshot(),
            settings=convert.settings_to_proto(control.settings),
            invitations=[convert.invitation_to_proto(found) for found in control.invitations.all()],
            device=convert.device_to_proto(self._device),
        )
        if self.desk.last is not None:
            state.last_run.CopyFrom(convert.execution_to_last_run(self.desk.last))
        return state

    def _show(self) -> None:
        self._reporter.poke()
        self.control.changed()

    async def _save(self, settings: DeviceSettings) -> None:
        await asyncio.to_thread(self._settings_file.save, settings)

    def _runner(self) -> BackendRunner:
        given, folder = self._settings.memory_bytes, self._settings.folder
        most = given if given is not None else psutil.virtual_memory().total * 3 // 4
        limits = DeviceLimits(
            memory_bytes=max(PAGE, min(most, MOST_PAGES * PAGE)), step_seconds=self._settings.step_seconds
        )
        return BackendRunner(
            self.pool,
            folder / "scratch",
            folder / "compiled",
            limits,
            lambda: self.control.workers_allowed,
            gpu=self.gpu_pool,
            settings=lambda: self.control.settings,
            sizes=self._gpu.sizes,
        )


def _connect(root_cert: Path | None, address: str, token: Callable[[], str]) -> grpc.aio.Channel:
    return connect(address, token, root_cert=root_cert)


def _backoff(first: float, most: float) -> Backoff:
    return Backoff(first, most, random.random)


class _Gpu:
    """The domain's `Gpu`."""

    def __init__(self, sizes: PlanSizes) -> None:
        self.sizes = sizes
        self.known = asyncio.Event()

    async def found(self) -> None:
        await self.known.wait()

    async def plan_bytes(self, package: Package, config: Config) -> int | None:
        return await self.sizes.find(package, config)


@dataclass(frozen=True)
class _Found:
    """What was in the folder, or was put there now."""

    identity: Identity
    settings: DeviceSettings
    adapters: tuple[Adapter, ...]


def _find(settings: ParticipantSettings) -> _Found:
    """Reads or makes what lies in the folder, and removes results that an earlier run left behind."""
    folder = settings.folder
    identity = identities.load_or_create(folder, settings.participant_id)
    shutil.rmtree(folder / "scratch", ignore_errors=True)
    for name in ("scratch", "compiled", "cache", "shaders"):
        (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    device_settings = SettingsFile(folder).start_with(
        accept_all=settings.accept_all,
        preference=settings.preference,
        max_local_workers=settings.max_local_workers,
        gpu_memory_budget_mib=settings.gpu_memory_budget_mib,
    )
    return _Found(identity, device_settings, AdaptersFile(folder).load())
