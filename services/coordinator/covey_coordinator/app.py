"""Puts the coordinator together: the only module that knows all rooms."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import grpc.aio
import structlog

from covey.v1 import coordinator_service_pb2_grpc, work_service_pb2_grpc
from covey_coordinator.domain.desk import Desk
from covey_coordinator.domain.invitations import Invitations
from covey_coordinator.domain.jobs import JobCommands
from covey_coordinator.domain.mesh import Mesh
from covey_coordinator.domain.pages import PageTokens
from covey_coordinator.domain.queries import Queries
from covey_coordinator.domain.recovery import recover
from covey_coordinator.domain.results import Results
from covey_coordinator.domain.rounds import RoundDriver
from covey_coordinator.domain.world import JobRun, Options, World
from covey_coordinator.state.blob_storage import StorageLink
from covey_coordinator.state.checkpoints import RoundCheckpoints
from covey_coordinator.state.database import Database
from covey_coordinator.state.issuer import Issuer
from covey_coordinator.state.spill import DeltaSpill
from covey_coordinator.transport.coordinator import CoordinatorServicer
from covey_coordinator.transport.work import WorkServicer
from covey_kit.clock import Clock, SystemClock
from covey_kit.folders import FolderLock
from covey_kit.tokens import SigningKey

__all__ = ["CoordinatorApp", "CoordinatorSettings"]

log = structlog.get_logger(__name__)

_RELEASE_INTERVAL = 30.0


@dataclass(frozen=True)
class CoordinatorSettings:
    """What the operator decides.

    Attributes:
        folder: everything that must last, for one process at a time.
        database_url: SQLAlchemy URL with an async driver; None: SQLite in the folder.
        storage_address: `HOST:PORT` of storage. Empty: set with `use_storage` before `start`.
        told_storage_address: what participants are told; empty: this server's own address.
        told_diagnostics_address: the same for diagnostics.
        root_cert: PEM to verify storage's TLS with; None: plain text.
        options: times.
        clock: where time comes from.
    """

    folder: Path
    database_url: str | None = None
    storage_address: str = ""
    told_storage_address: str = ""
    told_diagnostics_address: str = ""
    root_cert: Path | None = None
    options: Options = field(default_factory=Options)
    clock: Clock = field(default_factory=SystemClock)


class CoordinatorApp:
    """The coordinator. Made by `open`; serves once `start` returned."""

    service_names: Sequence[str] = ("covey.v1.CoordinatorService", "covey.v1.WorkService")

    def __init__(
        self, settings: CoordinatorSettings, key: SigningKey, lock: FolderLock, database: Database
    ) -> None:
        self._lock = lock
        self._database = database
        self._storage = StorageLink(key, settings.root_cert)
        self._storage.use(settings.storage_address)
        self._addresses = (settings.told_storage_address, settings.told_diagnostics_address)
        self._spill = DeltaSpill(settings.folder / "deltas")
        self._checkpoints = RoundCheckpoints(settings.folder / "checkpoints", self._spill, self._storage)
        issuer = Issuer(key)
        self._world = World(database, settings.clock, settings.options)
        self._desk = Desk(self._world, issuer)
        self._mesh = Mesh(self._world, issuer)
        self._invitations = Invitations(self._world, issuer)
        self._results = Results(self._world)
        # Tokens of a run are good for that run: a list is read in seconds.
        self._queries = Queries(self._world, PageTokens(secrets.token_bytes(32)))
        self._jobs = JobCommands(self._world, self._storage, self._checkpoints, self._drive)
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    @classmethod
    async def open(cls, settings: CoordinatorSettings, signing_key: SigningKey) -> Self:
        """Takes the folder and opens the database.

        Raises:
            FailedPrecondition: another process has the folder, or its database is of another version.
        """
        lock = await asyncio.to_thread(FolderLock, settings.folder)
        try:
            database = await Database.open(settings.folder, settings.database_url)
        except BaseException:
            lock.release()
            raise
        return cls(settings, signing_key, lock, database)

    def use_storage(self, address: str) -> None:
        """Says where storage is, when it wasn't known at `open`. Before `start`."""
        self._storage.use(address)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicers."""
        owners = CoordinatorServicer(self._world, self._jobs, self._invitations, self._queries, self._storage)
        work = WorkServicer(self._mesh, self._invitations, self._results, self._spill, self._addresses)
        coordinator_service_pb2_grpc.add_CoordinatorServiceServicer_to_server(owners, server)
        work_service_pb2_grpc.add_WorkServiceServicer_to_server(work, server)

    async def start(self) -> None:
        """Brings back what was in hand, and goes on with it. Storage needn't be reachable."""
        await recover(self._world, self._checkpoints)
        for job in list(self._world.jobs.values()):
            self._drive(job)
        self._tasks = [
            asyncio.create_task(self._desk.run(), name="desk"),
            asyncio.create_task(self._release(), name="release"),
        ]

    def _drive(self, job: JobRun) -> None:
        async def drive() -> None:
            try:
                await RoundDriver(self._world, self._checkpoints, job).run()
            except asyncio.CancelledError:
                if not job.record.state.ended:  # the server stops; else the job was ended from outside
                    raise
                task = asyncio.current_task()
                assert task is not None
                task.uncancel()
            await self._jobs.retire(job)

        job.driver = asyncio.create_task(drive(), name=f"job {job.record.job_id}")

    async def _release(self) -> None:
        """Releases in storage what deleted jobs held, until it is done; again when there is more."""
        while True:
            self._jobs.release_wake.clear()
            try:
                await self._jobs.release_pending()
            except Exception:
                log.exception("releasing files failed; it is tried again")
            try:
                async with asyncio.timeout(_RELEASE_INTERVAL):
                    await self._jobs.release_wake.wait()
            except TimeoutError:
                pass

    async def drain(self) -> None:
        """Hands out nothing more, and tells participants and watchers that the server stops."""
        self._desk.open = False
        self._queries.stop()
        await self._mesh.save_last_seen()
        self._mesh.drain()

    async def close(self) -> None:
        """Ends all tasks and lets go of the folder. The next start goes on. May be called twice."""
        if self._closed:
            return
        self._closed = True
        drivers = [job.driver for job in self._world.jobs.values() if job.driver is not None]
        running = [*self._tasks, *drivers]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._world.exclusive.idle()
        await self._storage.close()
        await self._database.close()
        self._lock.release()
