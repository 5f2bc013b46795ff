"""How fast blobs move, against what this machine could do at best.

    python benchmarks/storage_throughput.py --megabytes 256 --repeat 5

In one run, over loopback between two processes, interleaved so that noise hits all alike:

* `raw up` / `raw down`: a bare gRPC stream of the same messages (1 MiB in a `bytes` field), nothing done with
  them;
* `file`: SHA-256 and a file write in one thread, without any network: what one stream can't beat by much;
* `write` / `read`: `WriteBlob` (hashed, verified, fsynced) and `ReadBlob` (hashed on the server; here only
  counted);
* `kit write` / `kit read`: `covey_kit.blobs`, file to file, hashed and verified on both sides.

Prints medians in MB/s (10^6 bytes) and ratios; `--json FILE` keeps them with what they were measured on.
"""

import argparse
import asyncio
import hashlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from covey.v1 import common_pb2
from covey.v1 import storage_service_pb2 as pb
from covey.v1 import storage_service_pb2_grpc as pb_grpc
from covey_kit.blobs import BULK_BYTES, read_blob, write_blob
from covey_kit.caller import Role
from covey_kit.channel import connect
from covey_kit.limits import MESSAGE_BYTES
from covey_kit.memory import tune_malloc
from covey_kit.tokens import SigningKey
from covey_kit.uploads import Upload

OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
]


class RawStorage(pb_grpc.StorageServiceServicer):
    """The same streams with nothing behind them.

    What it sends lies in 128 MiB of memory: one block again and again would come from the processor's caches,
    which no file's bytes do.
    """

    def __init__(self) -> None:
        self._blocks = [os.urandom(BULK_BYTES) for _ in range(128)]

    async def WriteBlob(self, request_iterator: Any, context: Any) -> pb.WriteBlobResponse:
        """Reads to the end."""
        while (await context.read()) is not grpc.aio.EOF:
            pass
        return pb.WriteBlobResponse()

    async def ReadBlob(self, request: pb.ReadBlobRequest, context: Any) -> None:
        """Sends random bytes."""
        for index in range(request.limit // BULK_BYTES):
            await context.write(pb.ReadBlobResponse(data=self._blocks[index % len(self._blocks)]))


async def serve_raw() -> None:
    """The raw server, as a process of its own."""
    tune_malloc()
    server = grpc.aio.server(options=OPTIONS)
    pb_grpc.add_StorageServiceServicer_to_server(RawStorage(), server)  # type: ignore[abstract]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready on 127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[str]:
    """Runs a server and gives its address."""
    found = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)
    assert found.stdout is not None
    try:
        yield (await found.stdout.readline()).decode().split()[-1]
    finally:
        found.terminate()
        await found.wait()


async def push(stub: Any, path: Path, blob: common_pb2.BlobRef) -> None:
    """Writes a file's bytes in one stream; the file is read from the page cache."""
    stream: Upload[pb.WriteBlobRequest, pb.WriteBlobResponse] = Upload(stub.WriteBlob())
    await stream.write(pb.WriteBlobRequest(header=pb.WriteBlobHeader(blob=blob)))
    with path.open("rb") as file:
        while block := file.read(BULK_BYTES):
            await stream.write(pb.WriteBlobRequest(data=block))
    await stream.finish()


async def pull(stub: Any, blob: common_pb2.BlobRef) -> None:
    """Reads a stream to its end."""
    call = stub.ReadBlob(pb.ReadBlobRequest(sha256=blob.sha256, limit=blob.size_bytes))
    got = 0
    while (message := await call.read()) is not grpc.aio.EOF:
        got += len(message.data)
    assert got == blob.size_bytes, got


def hash_and_write(source: Path, target: Path) -> None:
    """The floor: one thread, no network, fsync included."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("wb", buffering=0) as writer:
        while block := reader.read(BULK_BYTES):
            digest.update(block)
            writer.write(block)
        os.fsync(writer.fileno())


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Seconds that it took."""
    start = time.perf_counter()
    await work()
    return time.perf_counter() - start


@dataclass
class Bench:
    """What the cases work with."""

    folder: Path
    size: int
    raw: Any
    stub: Any
    channel: grpc.aio.Channel

    async def turn(self) -> dict[str, float]:
        """Runs every case once on fresh bytes; returns seconds."""
        source, other, copy = (self.folder / name for name in ("source", "other", "copy"))
        blob, kit_blob = [await asyncio.to_thread(fill, path, self.size) for path in (source, other)]
        await asyncio.to_thread(os.sync)
        cases: dict[str, Callable[[], Awaitable[object]]] = {
            "raw up": lambda: push(self.raw, source, blob),
            "raw down": lambda: pull(self.raw, blob),
            "file": lambda: asyncio.to_thread(hash_and_write, source, copy),
            "write": lambda: push(self.stub, source, blob),
            "read": lambda: pull(self.stub, blob),
            "kit write": lambda: write_blob(self.channel, other, kit_blob.sha256, self.size),
            "kit read": lambda: read_blob(self.channel, kit_blob.sha256, copy),
        }
        seconds = {name: await timed(work) for name, work in cases.items()}
        for used in (blob, kit_blob):
            await self.stub.DeleteBlob(pb.DeleteBlobRequest(sha256=used.sha256))
        return seconds


def fill(path: Path, size: int) -> common_pb2.BlobRef:
    """Writes a file of fresh bytes."""
    path.write_bytes(os.urandom(BULK_BYTES) * (size // BULK_BYTES))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return common_pb2.BlobRef(sha256=digest, size_bytes=size)


async def measure(folder: Path, megabytes: int, repeat: int) -> dict[str, list[float]]:
    """Returns MB/s of each repetition of each case."""
    key = SigningKey.load_or_create(folder / "key.pem")
    size = megabytes * 1_000_000 // BULK_BYTES * BULK_BYTES
    rates: dict[str, list[float]] = {}
    storage_arguments = ("serve", "--listen", "127.0.0.1:0", "--folder", str(folder / "storage"))
    trust = ("--trusted-key", str(folder / "key.pub"), "--log-level", "warning", "--min-free-bytes", "0")
    async with (
        process(__file__, "--serve-raw") as raw_address,
        process("-m", "covey_storage", *storage_arguments, *trust) as address,
        grpc.aio.insecure_channel(raw_address, options=OPTIONS) as raw_channel,
        connect(address, key.issue("benchmark", Role.SERVICE, 3600)) as channel,
    ):
        raw, stub = pb_grpc.StorageServiceStub(raw_channel), pb_grpc.StorageServiceStub(channel)
        bench = Bench(folder, size, raw, stub, channel)
        for turn in range(repeat + 1):
            for name, seconds in (await bench.turn()).items():
                if turn > 0:  # the first turn warms everything up
                    rates.setdefault(name, []).append(size / seconds / 1e6)
    return rates


def report(rates: dict[str, list[float]], arguments: argparse.Namespace) -> None:
    """Prints medians and ratios."""
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = {"write": "raw up", "kit write": "raw up", "read": "raw down", "kit read": "raw down"}
    print(f"{'':10} {'MB/s':>6} {'min':>6} {'max':>6}  of raw  of file")
    for name, median in medians.items():
        of_raw = f"{median / medians[best[name]]:6.2f}" if name in best else "     —"
        of_file = f"{median / medians['file']:7.2f}" if name in best else "      —"
        print(f"{name:10} {median:6.0f} {min(rates[name]):6.0f} {max(rates[name]):6.0f}  {of_raw} {of_file}")
    if arguments.json:
        facts = {
            "megabytes": arguments.megabytes,
            "repeat": arguments.repeat,
            "cpus": os.cpu_count(),
            "load": os.getloadavg(),
            "python": platform.python_version(),
            "grpcio": grpc.__version__,
            "rates_mb_per_s": rates,
            "medians_mb_per_s": medians,
        }
        arguments.json.write_text(json.dumps(facts, indent=2) + "\n")


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=256, help="size of each blob")
    parser.add_argument("--repeat", type=int, default=5, help="measured repetitions")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="keep the numbers here")
    parser.add_argument("--serve-raw", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_raw:
        asyncio.run(serve_raw())
        return
    tune_malloc()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        report(asyncio.run(measure(Path(name), arguments.megabytes, arguments.repeat)), arguments)


if __name__ == "__main__":
    main()
