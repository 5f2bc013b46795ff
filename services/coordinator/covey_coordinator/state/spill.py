"""Where deltas lie until their round is finished: `deltas/<job>/r<round>/` in the coordinator's folder."""

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

from covey_coordinator.domain.model import DeltaFile
from covey_coordinator.domain.results import Push
from covey_coordinator.state.deltas import DeltaSink, StoredDelta, recover_round, remove_round

__all__ = ["DeltaSpill", "SpillSink"]


class SpillSink:
    """One delta as it arrives."""

    def __init__(self, sink: DeltaSink, root: Path) -> None:
        self._sink = sink
        self._root = root

    async def write(self, data: bytes) -> None:
        """Takes the next bytes. Raises InvalidArgument or ResourceExhausted."""
        await self._sink.write(data)

    async def finish(self) -> DeltaFile:
        """Verifies it all; when it returns, the delta lasts. Raises what `DeltaSink.finish` does."""
        stored = await self._sink.finish()
        return DeltaFile(str(stored.path.relative_to(self._root)), stored.sha256, stored.size)

    async def abort(self) -> None:
        """Removes what came; does nothing after `finish`."""
        await self._sink.abort()


class DeltaSpill:
    """The folder of all deltas."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def _round(self, job_id: str, round_number: int) -> Path:
        return self._root / job_id / f"r{round_number}"

    def stored(self, delta: DeltaFile) -> StoredDelta:
        """Returns where a delta lies."""
        return StoredDelta(self._root / delta.name, delta.sha256, delta.size)

    async def open(self, push: Push) -> SpillSink:
        """Prepares to receive a delta."""
        header = push.header
        job_id, round_part, place = header.assignment_id.split(".")
        folder = self._root / job_id / round_part
        sink = await DeltaSink.open(
            folder, f"{place}-{header.attempt}", push.weight_count, header.size, header.sha256
        )
        return SpillSink(sink, self._root)

    async def recover(self, job_id: str, round_number: int, accepted: Sequence[DeltaFile]) -> set[str]:
        """Tidies the folder of a job's open round after a restart, and removes those of all others.

        Returns the names of accepted deltas that are gone or damaged.
        """
        keep = self._round(job_id, round_number)
        damaged = await recover_round(keep, [self.stored(delta) for delta in accepted])
        await asyncio.to_thread(self._sweep, keep)
        return {str(delta.path.relative_to(self._root)) for delta in damaged}

    def _sweep(self, keep: Path) -> None:
        if keep.parent.is_dir():
            for other in keep.parent.iterdir():
                if other != keep:
                    shutil.rmtree(other, ignore_errors=True)

    async def remove(self, job_id: str, round_number: int) -> None:
        """Removes the deltas of a finished round."""
        await remove_round(self._round(job_id, round_number))

    async def forget(self, job_id: str) -> None:
        """Removes everything of a job."""
        await asyncio.to_thread(shutil.rmtree, self._root / job_id, ignore_errors=True)

    async def jobs(self) -> list[str]:
        """Returns the jobs that something is there of."""
        return await asyncio.to_thread(
            lambda: sorted(path.name for path in self._root.iterdir()) if self._root.is_dir() else []
        )
