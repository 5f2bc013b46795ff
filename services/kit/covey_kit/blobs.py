"""Blobs to and from storage: resumable, retried, hashed on this side too."""

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc
import grpc.aio

from covey.v1 import common_pb2, storage_service_pb2, storage_service_pb2_grpc
from covey_kit.bulk import FileSink, digest_file, file_blocks
from covey_kit.errors import (
    Aborted,
    CoveyError,
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    Reason,
    ResourceExhausted,
    Unavailable,
)
from covey_kit.files import sync_folder
from covey_kit.limits import BULK_BYTES
from covey_kit.policy import policies
from covey_kit.status import rpc_errors
from covey_kit.uploads import Upload

__all__ = [
    "BULK_BYTES",
    "FileSink",
    "OnProgress",
    "digest_file",
    "file_blocks",
    "read_blob",
    "read_bytes",
    "write_blob",
    "write_bytes",
]

OnProgress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) as a transfer moves on."""

_ATTEMPTS = 12
"""Tries in a row that move nothing on before a transfer is given up: about half a minute."""

_FIRST_BACKOFF = 0.1
_LONGEST_BACKOFF = 5.0
_Blocks = Callable[[int], AsyncGenerator[bytes, None]]
_ReadCall: TypeAlias = (
    "grpc.aio.UnaryStreamCall[storage_service_pb2.ReadBlobRequest, storage_service_pb2.ReadBlobResponse]"
)


class _Retries:
    """Decides whether a transfer that was cut goes on, and waits before it does."""

    def __init__(self) -> None:
        self._left = _ATTEMPTS
        self._backoff = _FIRST_BACKOFF
        self._most = -1

    async def wait(self, error: CoveyError, done: int) -> None:
        """Waits before the next try; raises `error` when `done` bytes haven't grown for too many tries."""
        if done > self._most:
            self._most, self._left, self._backoff = done, _ATTEMPTS, _FIRST_BACKOFF
        self._left -= 1
        if self._left <= 0:
            raise error
        await asyncio.sleep(self._backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret
        self._backoff = min(self._backoff * 2, _LONGEST_BACKOFF)


# ---------------------------------------------------------------- writing


async def write_blob(
    channel: grpc.aio.Channel,
    path: Path,
    sha256: str,
    size: int,
    on_progress: OnProgress | None = None,
) -> bool:
    """Writes a file to storage; a write that was cut goes on where it stopped.

    Args:
        channel: to storage, with a token that may write.
        path: the file. It mustn't change meanwhile.
        sha256: its SHA-256, such as `digest_file` returns it.
        size: its size in bytes.
        on_progress: told how far it is.

    Returns:
        True when storage had it already.

    Raises:
        InvalidArgument: SIZE_MISMATCH or DIGEST_MISMATCH, the file isn't what was announced.
        ResourceExhausted: too large for storage, or storage is full.
        Unavailable: storage didn't come back.
        OSError: the file can't be read.
    """
    found = (await asyncio.to_thread(path.stat)).st_size
    if found != size:
        raise InvalidArgument(
            Reason.SIZE_MISMATCH, f"{path.name} has {found} bytes; {size} were announced: hash it again"
        )
    return await _write(channel, _Upload(sha256, size, lambda offset: file_blocks(path, offset), on_progress))


async def write_bytes(channel: grpc.aio.Channel, data: bytes) -> common_pb2.BlobRef:
    """Writes bytes from memory to storage and returns their reference. Raises what `write_blob` does."""

    async def blocks(offset: int) -> AsyncGenerator[bytes, None]:
        for start in range(offset, len(data), BULK_BYTES):
            yield data[start : start + BULK_BYTES]

    sha256 = (await asyncio.to_thread(hashlib.sha256, data)).hexdigest()
    await _write(channel, _Upload(sha256, len(data), blocks, None))
    return common_pb2.BlobRef(sha256=sha256, size_bytes=len(data))


@dataclass
class _Upload:
    sha256: str
    size: int
    blocks: _Blocks
    on_progress: OnProgress | None

    def moved(self, done: int) -> None:
        if self.on_progress is not None:
            self.on_progress(done, self.size)


async def _write(channel: grpc.aio.Channel, upload: _Upload) -> bool:
    stub = storage_service_pb2_grpc.StorageServiceStub(channel)
    retries = _Retries()
    offset = 0
    again = True
    while True:
        try:
            with rpc_errors():
                state = await stub.QueryWrite(storage_service_pb2.QueryWriteRequest(sha256=upload.sha256))
                offset = min(state.committed_bytes, upload.size)
                if state.complete:
                    upload.moved(upload.size)
                    return True
                return await _send(stub, upload, offset)
        except (Unavailable, Aborted, DeadlineExceeded) as error:
            await retries.wait(error, offset)
        except CoveyError as error:
            if error.reason is Reason.OFFSET_MISMATCH:
                await retries.wait(error, offset)
            elif error.reason is Reason.DIGEST_MISMATCH and offset > 0 and again:
                # Storage's part was someone else's, or damaged: it dropped it, so begin anew, once.
                again = False
            else:
                raise


async def _send(stub: storage_service_pb2_grpc.StorageServiceStub, upload: _Upload, offset: int) -> bool:
    stream = Upload(stub.WriteBlob())
    try:
        header = storage_service_pb2.WriteBlobHeader(
            blob=common_pb2.BlobRef(sha256=upload.sha256, size_bytes=upload.size), offset=offset
        )
        goes_on = await stream.write(storage_service_pb2.WriteBlobRequest(header=header))
        async with aclosing(upload.blocks(offset)) as blocks:
            async for block in blocks:
                if not goes_on:
                    break
                goes_on = await stream.write(storage_service_pb2.WriteBlobRequest(data=block))
                offset += len(block)
                upload.moved(offset)
        response = await stream.finish()
    finally:
        stream.cancel()
    upload.moved(upload.size)
    return response.already_existed


# ---------------------------------------------------------------- reading


async def read_blob(
    channel: grpc.aio.Channel,
    sha256: str,
    path: Path,
    *,
    offset: int = 0,
    size: int | None = None,
    expected_sha256: str | None = None,
    on_progress: OnProgress | None = None,
    token: str | None = None,
) -> None:
    """Reads a blob, or a range of it, into a file that appears whole, verified and on disk.

    A read that was cut goes on, also in a later process: the part is kept beside `path` (hidden, `.part`).
    One read at a time may write to `path`.

    Args:
        channel: to storage.
        sha256: the blob.
        path: where to. Replaced if it's there; its folder must exist.
        offset: first byte of the range.
        size: bytes of the range; None: all that follow.
        expected_sha256: digest of the range, where it's known; a whole blob's is its key.
        on_progress: told how far it is.
        token: a grant for this call; None: the channel's token.

    Raises:
        DataLoss: the bytes aren't those asked for, or storage found its copy damaged.
        NotFound, PermissionDenied, OutOfRange: as the contract says.
        ResourceExhausted: STORAGE_FULL, no room on this device.
        Unavailable: storage didn't come back.
    """
    if size is not None and size <= 0:
        raise ValueError(f"a range of {size} bytes was asked for; expected at least one")
    if expected_sha256 is None and offset == 0 and size is None:
        expected_sha256 = sha256
    part = path.with_name(f".{path.name}.{sha256[:8]}-{offset}.part")
    download = _Download(channel, sha256, offset, size, expected_sha256, on_progress, token)
    # Without a digest to check the whole by, only an uncut stream can be trusted.
    resume = expected_sha256 is not None and await asyncio.to_thread(part.exists)
    retries = _Retries()
    while True:
        sink = await FileSink.open(part, resume=resume)
        resumed = sink.size > 0
        try:
            await download.fetch(sink)
        except (Unavailable, DeadlineExceeded) as error:
            await sink.close()
            await retries.wait(error, sink.size)
            resume = expected_sha256 is not None
        except (DataLoss, OSError) as error:
            if not resumed or not (isinstance(error, DataLoss) and error.reason is Reason.DIGEST_MISMATCH):
                await sink.abort()
                raise _told(error) from error
            resume = False  # the old part may be what's damaged: once more, from the beginning
        except BaseException:
            await sink.close()
            raise
        else:
            await asyncio.to_thread(_put_in_place, part, path)
            return
        finally:
            await sink.close()


def _told(error: DataLoss | OSError) -> CoveyError:
    if isinstance(error, OSError):
        return ResourceExhausted(Reason.STORAGE_FULL, f"the blob can't be kept here: {error.strerror}")
    return error


def _put_in_place(part: Path, path: Path) -> None:
    part.replace(path)
    sync_folder(path.parent)


async def read_bytes(
    channel: grpc.aio.Channel, sha256: str, *, max_bytes: int, token: str | None = None
) -> bytes:
    """Reads a small blob into memory, verified.

    Raises:
        ResourceExhausted: LIMIT_EXCEEDED, it has more than `max_bytes`.
        DataLoss, NotFound, PermissionDenied, Unavailable: as `read_blob`.
    """
    retries = _Retries()
    download = _Download(channel, sha256, 0, None, sha256, None, token)
    while True:
        parts: list[bytes] = []
        try:
            async for block in download.blocks(0):
                if download.total > max_bytes:
                    raise ResourceExhausted(
                        Reason.LIMIT_EXCEEDED,
                        f"blob {sha256} has {download.total} bytes; at most {max_bytes} fit",
                    )
                parts.append(block)
        except (Unavailable, DeadlineExceeded) as error:
            await retries.wait(error, sum(map(len, parts)))
            continue
        data = b"".join(parts)
        download.check((await asyncio.to_thread(hashlib.sha256, data)).hexdigest(), len(data))
        return data


@dataclass
class _Download:
    channel: grpc.aio.Channel
    sha256: str
    offset: int
    size: int | None
    expected: str | None
    on_progress: OnProgress | None
    token: str | None
    total: int = 0
    """Bytes of the range, once storage told."""
    range_sha256: str = ""
    """What storage says of the bytes of its last stream."""

    async def fetch(self, sink: FileSink) -> None:
        """Brings into the sink what it lacks, closes and checks it."""
        if self.size is None or sink.size < self.size:
            async with aclosing(self.blocks(sink.size)) as blocks:
                async for block in blocks:
                    await sink.write(block)
                    if self.on_progress is not None:
                        self.on_progress(sink.size, self.total)
        elif sink.size > self.size:
            raise DataLoss(Reason.DIGEST_MISMATCH, f"the part kept of blob {self.sha256} is too long")
        size, digest = await sink.finish()
        self.check(digest, size)

    def check(self, digest: str, size: int) -> None:
        """Compares what came with what was asked for. Raises DataLoss."""
        total = self.size if self.size is not None else self.total
        if size != total:
            raise DataLoss(
                Reason.DIGEST_MISMATCH, f"{size} bytes came of blob {self.sha256}; {total} were asked for"
            )
        expected = self.expected or self.range_sha256
        if digest != expected:
            raise DataLoss(
                Reason.DIGEST_MISMATCH,
                f"blob {self.sha256} from byte {self.offset}: it hashes to {digest}; expected {expected}",
                metadata={"expected": expected, "found": digest},
            )

    async def blocks(self, done: int) -> AsyncGenerator[bytes, None]:
        """Yields the bytes of the range behind its first `done`."""
        limit = 0 if self.size is None else self.size - done
        request = storage_service_pb2.ReadBlobRequest(
            sha256=self.sha256, offset=self.offset + done, limit=limit
        )
        metadata = (("authorization", f"Bearer {self.token}"),) if self.token else None
        stub = storage_service_pb2_grpc.StorageServiceStub(self.channel)
        idle = policies()["/covey.v1.StorageService/ReadBlob"].idle_timeout
        with rpc_errors():
            call = stub.ReadBlob(request, metadata=metadata)
            try:
                while True:
                    message = await _next(call, idle)
                    if message is None:
                        return
                    part = message.WhichOneof("part")
                    if part == "data":
                        yield message.data
                    elif part == "header":
                        self.total = done + message.header.size_bytes
                    else:
                        self.range_sha256 = message.range_sha256
            finally:
                call.cancel()


async def _next(call: _ReadCall, idle: float | None) -> storage_service_pb2.ReadBlobResponse | None:
    """Returns the next message, None at the end."""
    try:
        async with asyncio.timeout(idle):
            message = await call.read()
    except TimeoutError:
        raise DeadlineExceeded(Reason.DEADLINE, f"storage sent nothing for {idle:g} s") from None
    return message if isinstance(message, storage_service_pb2.ReadBlobResponse) else None
