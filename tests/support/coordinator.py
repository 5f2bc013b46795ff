"""A coordinator and a storage on one loopback port, a job's files in it, and an owner's stub."""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
from google.protobuf import json_format

from covey.v1 import common_pb2, job_pb2, package_pb2, storage_service_pb2
from covey.v1 import coordinator_service_pb2 as pb
from covey.v1 import coordinator_service_pb2_grpc as pb_grpc
from covey.v1 import storage_service_pb2_grpc as storage_grpc
from covey.v1.dataset_pb2 import Chunk, DatasetManifest
from covey_coordinator.app import CoordinatorApp, CoordinatorSettings
from covey_coordinator.domain.world import Options
from covey_kit.blobs import write_bytes
from covey_kit.caller import Role
from covey_kit.channel import connect
from covey_kit.serve import Host, ServeOptions
from covey_kit.status import rpc_errors
from covey_kit.tokens import SigningKey, Verifier
from covey_storage.app import StorageApp, StorageSettings
from support.eventually import eventually

QUICK = Options(grace=0.2, return_time=0.5, progress_interval=0.2)
"""Times for tests."""


class ShiftClock:
    """The machine's clock, which a test moves on."""

    def __init__(self) -> None:
        self.shift = 0.0

    def now(self) -> float:
        """Unix seconds."""
        return time.time() + self.shift

    def monotonic(self) -> float:
        """Seconds since some point."""
        return time.monotonic() + self.shift


ENDED = (job_pb2.JOB_STATE_COMPLETED, job_pb2.JOB_STATE_STOPPED, job_pb2.JOB_STATE_FAILED)


def digest(data: bytes) -> str:
    """SHA-256 as everything writes it."""
    return hashlib.sha256(data).hexdigest()


MODULE = b"\0asm\1\0\0\0"
HELD_OUT = b"held out"


def package(**changes: Any) -> package_pb2.ModelPackage:
    """A valid manifest of 7 weights; `changes` replace its keys, None takes a key out."""
    manifest: dict[str, Any] = {
        "format": "weei-model-package",
        "formatVersion": 1,
        "name": "small",
        "version": "1.0.0",
        "module": {"fileName": "model.wasm", "bytes": len(MODULE), "sha256": digest(MODULE)},
        "parameters": [{"name": "w", "shape": [2, 3]}, {"name": "b", "shape": []}],
        "dataFormats": ["small-v1"],
        "workSource": {"kind": "DATASET", "inputs": "dataset", "unit": "example"},
        "capabilities": {"training": True, "evaluation": True, "inference": False},
        "metrics": [{"name": "loss", "label": "Loss", "direction": "MINIMIZE", "unit": ""}],
        "hyperparameters": [
            {"name": "batchSize", "label": "Batch", "default": 4, "min": 1, "max": 64},
            {"name": "learningRate", "label": "Rate", "default": 0.1, "min": 0.0, "max": 1.0},
            {"name": "momentum", "label": "Momentum", "default": 0.5, "min": 0.0, "max": 0.99},
        ],
        "backends": [{"kind": "CPU_WASM"}],
        "validation": {"fileName": "validation.bin", "bytes": len(HELD_OUT), "sha256": digest(HELD_OUT)},
        "validationExampleCount": 10,
    }
    manifest = {key: value for key, value in (manifest | changes).items() if value is not None}
    return json_format.ParseDict(manifest, package_pb2.ModelPackage())


def chunk_bytes(number: int) -> bytes:
    """What a chunk holds."""
    return b"chunk %d" % number


def dataset(counts: Sequence[int]) -> DatasetManifest:
    """A manifest with a chunk for each example count."""
    chunks = [
        Chunk(
            id=f"c{n}",
            file_name=f"c{n}.bin",
            bytes=len(chunk_bytes(n)),
            sha256=digest(chunk_bytes(n)),
            format="small-v1",
            example_count=count,
        )
        for n, count in enumerate(counts)
    ]
    return DatasetManifest(chunks=chunks)


def uploaded(name: str, data: bytes) -> common_pb2.UploadedFile:
    """A file as it was uploaded."""
    blob = common_pb2.BlobRef(sha256=digest(data), size_bytes=len(data))
    return common_pb2.UploadedFile(file_name=name, blob=blob)


def job_request(counts: Sequence[int] = (5, 6, 7), **settings: Any) -> pb.CreateJobRequest:
    """A valid creation: the small package and a chunk for each example count."""
    files = [uploaded("model.wasm", MODULE), uploaded("validation.bin", HELD_OUT)]
    files += [uploaded(f"c{n}.bin", chunk_bytes(n)) for n in range(len(counts))]
    return pb.CreateJobRequest(
        package=package(),
        dataset=dataset(counts),
        settings=job_pb2.JobSettings(**{"assignments_per_round": 2, **settings}),
        files=files,
    )


class Mesh:
    """A coordinator and a storage that can be stopped and started again on the same folder.

    Args:
        folder: state of both.
        options: the coordinator's times.
        together: both on one port; otherwise storage has a port of its own.
        settings: more settings of the coordinator.
    """

    def __init__(
        self, folder: Path, options: Options = QUICK, *, together: bool = True, **settings: Any
    ) -> None:
        self.folder = folder
        self.together = together
        self.storage_port = 0
        self.options = options
        self.settings = settings
        self.port = 0
        self.stub: Any = None

    async def start(self) -> None:
        """Opens both; a restart takes the same ports."""
        self.key = await asyncio.to_thread(
            SigningKey.load_or_create, self.folder / "coordinator" / "signing-key.pem"
        )
        if not self.together:
            await self.start_storage()
            self.settings["told_storage_address"] = self.storage_address
        await self.start_coordinator()

    async def start_storage(self) -> None:
        """Opens storage on its own port."""
        storage = await StorageApp.open(StorageSettings(self.folder / "storage", min_free_bytes=0))
        options = ServeOptions(port=self.storage_port)
        self.storage_host = Host([storage], Verifier([self.key.public_pem]), options)
        self.storage_address = await self.storage_host.start()
        self.storage_port = int(self.storage_address.rpartition(":")[2])

    async def start_coordinator(self) -> None:
        """Opens the coordinator, and storage with it when they are together."""
        self.app = await CoordinatorApp.open(
            CoordinatorSettings(self.folder / "coordinator", options=self.options, **self.settings), self.key
        )
        apps: list[Any] = [self.app]
        if self.together:
            settings = StorageSettings(self.folder / "storage", min_free_bytes=0)
            apps.insert(0, await StorageApp.open(settings))
        self.host = Host(apps, Verifier([self.key.public_pem]), ServeOptions(port=self.port))
        self.address = self.host.bind()
        self.port = int(self.address.rpartition(":")[2])
        if self.together:
            self.storage_address = self.address
        self.app.use_storage(self.storage_address)
        await self.host.start()
        self.connect()

    def connect(self) -> None:
        """Opens the owner's channel."""
        self._channel = self.channel(Role.OWNER)
        self.stub = pb_grpc.CoordinatorServiceStub(self._channel)

    async def disconnect(self) -> None:
        """Closes the owner's channel."""
        await self._channel.close()

    async def stop(self) -> None:
        """Stops both."""
        await self.stop_coordinator()
        if not self.together:
            await self.storage_host.stop(grace=0.5)

    async def stop_coordinator(self) -> None:
        """Stops the coordinator, and storage with it when they are together."""
        await self.disconnect()
        await self.host.stop(grace=0.5)

    def channel(self, role: Role, job_id: str | None = None, address: str | None = None) -> grpc.aio.Channel:
        """A channel with a token of this role."""
        return connect(address or self.address, self.key.issue("tester", role, 600, job_id))

    async def upload(self, count: int) -> None:
        """Writes the files of `job_request` to storage."""
        async with self.channel(Role.OWNER, address=self.storage_address) as channel:
            for data in (MODULE, HELD_OUT, *(chunk_bytes(n) for n in range(count))):
                await write_bytes(channel, data)

    async def call(self, method: str, request: Any) -> Any:
        """Calls CoordinatorService; errors come as CoveyError."""
        with rpc_errors():
            return await getattr(self.stub, method)(request)

    async def create(self, counts: Sequence[int] = (5, 6, 7), **settings: Any) -> str:
        """Uploads and creates a job; returns its id."""
        await self.upload(len(counts))
        return str((await self.call("CreateJob", job_request(counts, **settings))).job.job_id)

    async def job(self, job_id: str) -> job_pb2.Job:
        """The job as it is now."""
        found: job_pb2.Job = (await self.call("GetJob", pb.GetJobRequest(job_id=job_id))).job
        return found

    async def invite_all(self, job_id: str, accepted: int) -> None:
        """Invites everyone and waits until so many accepted."""
        await self.call("InviteParticipants", pb.InviteParticipantsRequest(job_id=job_id, all_connected=True))

        async def enough() -> bool:
            job = await self.job(job_id)
            return (
                sum(p.invitation == job_pb2.INVITATION_STATE_ACCEPTED for p in job.participants) >= accepted
            )

        await eventually(enough, message=f"{accepted} accepted")

    async def begin(self, job_id: str, accepted: int) -> None:
        """Invites everyone, and starts the job when they accepted."""
        await self.invite_all(job_id, accepted)
        await self.call("StartJob", pb.StartJobRequest(job_id=job_id))

    async def ended(self, job_id: str, timeout: float = 20.0) -> job_pb2.Job:
        """Waits until the job ended."""

        async def done() -> job_pb2.Job | None:
            job = await self.job(job_id)
            return job if job.state in ENDED else None

        found = await eventually(done, timeout, f"{job_id} ends")
        assert found is not None
        return found

    async def rounds(self, job_id: str) -> list[job_pb2.RoundSummary]:
        """Finished rounds."""
        return list((await self.call("ListRounds", pb.ListRoundsRequest(job_id=job_id))).rounds)

    async def inventory(self) -> storage_service_pb2.GetInventoryResponse:
        """What storage has."""
        async with self.channel(Role.OWNER, address=self.storage_address) as channel:
            stub: Any = storage_grpc.StorageServiceStub(channel)
            with rpc_errors():
                found: storage_service_pb2.GetInventoryResponse = await stub.GetInventory(
                    storage_service_pb2.GetInventoryRequest()
                )
        return found


@asynccontextmanager
async def mesh(folder: Path, options: Options = QUICK, **changes: Any) -> AsyncIterator[Mesh]:
    """A running coordinator and storage in `folder`; `changes` as of `Mesh`."""
    found = Mesh(folder, options, **changes)
    await found.start()
    try:
        yield found
    finally:
        await found.stop()
