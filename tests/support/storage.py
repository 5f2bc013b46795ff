"""A real storage service on a loopback port, and checkpoint files of every kind."""

import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from covey.v1 import checkpoint_pb2, common_pb2, package_pb2
from covey.v1 import storage_service_pb2 as pb
from covey.v1 import storage_service_pb2_grpc as pb_grpc
from covey_kit.caller import Role
from covey_kit.channel import connect
from covey_kit.checkpoints import CheckpointWriter
from covey_kit.serve import Host, ServeOptions
from covey_kit.tokens import SigningKey, Verifier
from covey_kit.uploads import Upload
from covey_storage.app import StorageApp, StorageSettings

MODULE = "a" * 64
PARAMETERS = (
    package_pb2.Parameter(name="dense.weight", shape=[6, 4]),
    package_pb2.Parameter(name="dense.bias", shape=[4]),
    package_pb2.Parameter(name="scale"),
)
WEIGHTS = 29


def sha256(data: bytes) -> str:
    """The digest as everything writes it."""
    return hashlib.sha256(data).hexdigest()


def listing(folder: Path) -> set[str]:
    """The names in a folder."""
    return {path.name for path in folder.iterdir()}


def ref(data: bytes) -> common_pb2.BlobRef:
    """A reference to these bytes."""
    return common_pb2.BlobRef(sha256=sha256(data), size_bytes=len(data))


class Storage:
    """A storage that serves, and channels to it by role."""

    def __init__(self, settings: StorageSettings) -> None:
        self.settings = settings
        self.folder = settings.folder
        self.key = SigningKey.generate()
        self.port = 0
        self._channels: list[grpc.aio.Channel] = []

    async def start(self) -> None:
        """Opens the folder and a port: the same one each time."""
        self.app = await StorageApp.open(self.settings)
        self.host = Host([self.app], Verifier([self.key.public_pem]), ServeOptions(port=self.port))
        self.port = int((await self.host.start()).rpartition(":")[2])

    async def stop(self) -> None:
        """Closes everything."""
        for channel in self._channels:
            await channel.close()
        self._channels = []
        await self.host.stop(grace=0)

    async def restart(self) -> None:
        """Stops and starts on the same folder, which mends what it finds there."""
        await self.stop()
        await self.start()

    def channel(self, role: Role = Role.SERVICE, job_id: str | None = None) -> grpc.aio.Channel:
        """A channel with a token of this role."""
        token = self.key.issue("tester", role, 300, job_id)
        channel = connect(self.host.address, token)
        self._channels.append(channel)
        return channel

    def stub(self, role: Role = Role.SERVICE, job_id: str | None = None) -> Any:
        """A stub with a token of this role."""
        return pb_grpc.StorageServiceStub(self.channel(role, job_id))

    def blob_path(self, digest: str) -> Path:
        """Where a visible blob's file lies."""
        return self.folder / "blobs" / digest[:2] / digest

    def part_path(self, digest: str) -> Path:
        """Where a part's file lies."""
        return self.folder / "partial" / digest


@asynccontextmanager
async def storage(folder: Path, **settings: Any) -> AsyncIterator[Storage]:
    """A running storage in `folder`."""
    found = Storage(StorageSettings(folder, **{"min_free_bytes": 0, **settings}))
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


async def put(
    stub: Any, data: bytes, *, offset: int = 0, blob: common_pb2.BlobRef | None = None, step: int = 1 << 20
) -> pb.WriteBlobResponse:
    """Writes `data[offset:]` in one stream, announcing `blob`."""
    header = pb.WriteBlobHeader(blob=blob or ref(data), offset=offset)
    stream: Upload[pb.WriteBlobRequest, pb.WriteBlobResponse] = Upload(stub.WriteBlob())
    await stream.write(pb.WriteBlobRequest(header=header))
    for start in range(offset, len(data), step):
        if not await stream.write(pb.WriteBlobRequest(data=data[start : start + step])):
            break
    return await stream.finish()


async def get(
    stub: Any, digest: str, offset: int = 0, limit: int = 0
) -> tuple[pb.ReadBlobHeader, bytes, str]:
    """Reads a range; returns header, bytes and the digest that was sent at the end."""
    header, parts, digest_sent = pb.ReadBlobHeader(), [], ""
    async for message in stub.ReadBlob(pb.ReadBlobRequest(sha256=digest, offset=offset, limit=limit)):
        part = message.WhichOneof("part")
        if part == "header":
            header = message.header
        elif part == "data":
            parts.append(message.data)
        else:
            digest_sent = message.range_sha256
    return header, b"".join(parts), digest_sent


def header(round_: int = 3) -> checkpoint_pb2.CheckpointHeader:
    """What a checkpoint says of itself."""
    found = checkpoint_pb2.CheckpointHeader(
        package_name="digits", package_version="1.0.0", module_sha256=MODULE, round=round_, seed=-7
    )
    found.metrics.add(name="loss", sum=0.1 + 0.2, count=64)
    found.metrics.add(name="accuracy", count=0)
    return found


def expectation(round_: int | None = None) -> pb.CheckpointExpectation:
    """What `write_checkpoint` fits."""
    return pb.CheckpointExpectation(
        parameters=PARAMETERS,
        package_name="digits",
        package_version="1.0.0",
        module_sha256=MODULE,
        round=round_,
    )


def weights(seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As many weights as `PARAMETERS` has."""
    return np.random.default_rng(seed).normal(size=WEIGHTS).astype(np.float32)


def write_checkpoint(
    path: Path, *, round_: int = 3, seed: int = 0, optimizer: Sequence[str] = ("optimizer.m", "optimizer.v")
) -> bytes:
    """Writes a valid version 2 checkpoint and returns its bytes."""
    values = weights(seed)
    with CheckpointWriter(path, header(round_), PARAMETERS, optimizer) as writer:
        writer.write_weights(values, 0)
        for index, name in enumerate(optimizer):
            writer.write_optimizer(name, values * np.float32(index + 2), 0)
        writer.finish()
    return path.read_bytes()


def split_file(data: bytes) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """Takes a checkpoint apart: safetensors header, checkpoint header, tensors' bytes."""
    size = int.from_bytes(data[:8], "little")
    outer = json.loads(data[8 : 8 + size])
    return outer, json.loads(outer["__metadata__"]["covey"]), data[8 + size :]


def join_file(outer: dict[str, Any], inner: dict[str, Any] | None, body: bytes) -> bytes:
    """The inverse of `split_file`; checks nothing, so that it makes damaged files too."""
    if inner is not None:
        outer = {**outer, "__metadata__": {"covey": json.dumps(inner)}}
    text = json.dumps(outer).encode()
    return len(text).to_bytes(8, "little") + text + body


def version_1(data: bytes) -> bytes:
    """A version 1 file with the weights of a version 2 file: no optimizer, no fields behind `metrics`."""
    outer, inner, body = split_file(data)
    v1_fields = {
        "packageName",
        "packageVersion",
        "moduleSha256",
        "round",
        "weightsSha256",
        "weightCount",
        "parameterNames",
        "metrics",
    }
    inner = {"formatVersion": 1, **{key: value for key, value in inner.items() if key in v1_fields}}
    outer = {name: entry for name, entry in outer.items() if not name.startswith("optimizer.")}
    return join_file(outer, inner, body[: 4 * WEIGHTS])
