"""Brings an assignment's files from storage into the cache, with the job's grant."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc.aio

from covey_kit.blobs import read_blob
from covey_kit.errors import Reason, Unavailable
from covey_participant.domain.backend import Choice
from covey_participant.domain.failure import WorkFailure
from covey_participant.domain.ports import Cache, Fetch, Inputs, OnTransfer
from covey_participant.domain.values import Assignment, Backend, Blob


class _Progress:
    """Adds up transfers that run side by side."""

    def __init__(self, on_transfer: OnTransfer) -> None:
        self._on_transfer = on_transfer
        self._parts: dict[str, tuple[int, int]] = {}

    def of(self, blob: Blob) -> OnTransfer:
        """Returns what one transfer reports to."""

        def moved(done: int, total: int) -> None:
            self._parts[blob.sha256] = (done, total)
            self._on_transfer(
                sum(part[0] for part in self._parts.values()), sum(part[1] for part in self._parts.values())
            )

        return moved


class StorageFiles:
    """The domain's `Files` over storage and the cache.

    Args:
        cache: where blobs stay.
        channel: returns the channel to storage that holds now.
    """

    def __init__(self, cache: Cache, channel: Callable[[], grpc.aio.Channel]) -> None:
        self._cache = cache
        self._channel = channel

    @asynccontextmanager
    async def hold(
        self, assignment: Assignment, choice: Choice, on_transfer: OnTransfer
    ) -> AsyncIterator[Inputs]:
        """Fetches what isn't there, side by side, and holds everything until the end of the block.

        Raises:
            WorkFailure: `STORAGE_UNAVAILABLE`, or `DEVICE` when the device has no room.
            CoveyError: what storage says: no grant, no such blob, damaged.
        """
        progress = _Progress(on_transfer)
        package = assignment.package
        archive = package.shader_archive if choice.backend is not Backend.CPU_WASM else None
        data = [chunk.blob for chunk in assignment.chunks]
        if assignment.held_out is not None:
            data.append(assignment.held_out.file)
        async with AsyncExitStack() as stack:

            async def bring(blob: Blob, fetch: Fetch) -> Path:
                return await stack.enter_async_context(self._cache.hold(blob, fetch))

            whole = _distinct([package.module, *data, *([archive] if archive else [])])
            wanted = [bring(blob, self._whole(blob, assignment, progress)) for blob in whole]
            if assignment.weights is not None:
                part = Blob(assignment.weights.sha256, assignment.weights.size)
                wanted.append(bring(part, self._range(part, assignment, progress)))
            await _all(wanted)
            yield Inputs(
                module=self._cache.path(package.module.sha256),
                weights=self._cache.path(assignment.weights.sha256) if assignment.weights else None,
                chunks=tuple(self._cache.path(blob.sha256) for blob in data),
                shader_archive=self._cache.path(archive.sha256) if archive else None,
            )

    def _whole(self, blob: Blob, assignment: Assignment, progress: _Progress) -> Fetch:
        async def fetch(path: Path) -> None:
            await _told(
                read_blob(
                    self._channel(),
                    blob.sha256,
                    path,
                    on_progress=progress.of(blob),
                    token=assignment.grant or None,
                )
            )

        return fetch

    def _range(self, part: Blob, assignment: Assignment, progress: _Progress) -> Fetch:
        weights = assignment.weights
        assert weights is not None

        async def fetch(path: Path) -> None:
            await _told(
                read_blob(
                    self._channel(),
                    weights.blob.sha256,
                    path,
                    offset=weights.offset,
                    size=weights.size,
                    expected_sha256=weights.sha256,
                    on_progress=progress.of(part),
                    token=assignment.grant or None,
                )
            )

        return fetch


def _distinct(blobs: list[Blob]) -> list[Blob]:
    return list({blob.sha256: blob for blob in blobs}.values())


async def _all(wanted: "list[Coroutine[None, None, Path]]") -> None:
    """Awaits all; after the first failure the others are cancelled, and it alone is raised."""
    tasks = [asyncio.ensure_future(one) for one in wanted]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _told(transfer: "Coroutine[None, None, None]") -> None:
    try:
        await transfer
    except Unavailable as error:
        raise WorkFailure(Reason.STORAGE_UNAVAILABLE, f"storage can't be reached: {error.message}") from error
