"""Checkpoint files: made from a round's sum, kept here until the next one, stored in storage."""

import asyncio
import shutil
from pathlib import Path

from covey.v1 import storage_service_pb2
from covey_coordinator.convert.checkpoint import expectation_to_proto, file_to_proto, header_to_proto
from covey_coordinator.convert.spec import package_to_proto
from covey_coordinator.convert.values import checkpoint_from_proto
from covey_coordinator.domain.model import CheckpointRef, DeltaFile
from covey_coordinator.domain.ports import CheckpointFile, Fold, RoundSummary
from covey_coordinator.domain.spec import JobSpec
from covey_coordinator.state.blob_storage import StorageLink
from covey_coordinator.state.round_sum import FinishedRound, RoundSum
from covey_coordinator.state.spill import DeltaSpill
from covey_kit.blobs import digest_file, read_blob, write_blob
from covey_kit.checkpoints import CheckpointReader

__all__ = ["RoundCheckpoints"]


class _Fold:
    """A `RoundSum` that knows where deltas lie."""

    def __init__(self, weight_count: int, spill: DeltaSpill) -> None:
        self.sum = RoundSum(weight_count)
        self._spill = spill

    async def add(self, index: int, delta: DeltaFile, units: int) -> None:
        """Adds the next delta. Raises DataLoss when its file can't be read any more."""
        await self.sum.add(index, self._spill.stored(delta), units)


class RoundCheckpoints:
    """`Checkpoints` over files and the storage service.

    Args:
        root: folder of the files: `<job>/r<round>.safetensors`.
        spill: where deltas lie.
        storage: the way to storage.
    """

    def __init__(self, root: Path, spill: DeltaSpill, storage: StorageLink) -> None:
        self._root = root
        self._spill = spill
        self._storage = storage
        self._trusted: dict[str, str] = {}  # job: digest of the file that this process made or checked

    def _path(self, job_id: str, round_number: int) -> Path:
        return self._root / job_id / f"r{round_number}.safetensors"

    def begin(self, spec: JobSpec) -> Fold:
        """Begins to sum up a round."""
        return _Fold(spec.package.weight_count, self._spill)

    async def _base(self, job_id: str, round_number: int, base: CheckpointRef) -> Path:
        """Returns the file of the base checkpoint, from storage when it isn't here whole."""
        path = self._path(job_id, round_number)
        if self._trusted.get(job_id) == base.sha256 and path.exists():
            return path
        if not path.exists() or await asyncio.to_thread(digest_file, path) != (base.size, base.sha256):
            await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
            await read_blob(self._storage.channel, base.sha256, path)
        self._trusted[job_id] = base.sha256
        return path

    async def finish(
        self, fold: Fold, job_id: str, spec: JobSpec, summary: RoundSummary, base: CheckpointRef | None
    ) -> CheckpointFile:
        """Makes the checkpoint of a round. Raises what `RoundSum.finish` and `read_blob` do."""
        assert isinstance(fold, _Fold)
        header = await asyncio.to_thread(header_to_proto, spec, summary)
        out = self._path(job_id, summary.round)
        await asyncio.to_thread(out.parent.mkdir, parents=True, exist_ok=True)
        reader = None
        if base is not None:
            path = await self._base(job_id, summary.round - 1, base)
            reader = await asyncio.to_thread(CheckpointReader, path)
        try:
            finished: FinishedRound = await fold.sum.finish(
                base=reader,
                aggregation=spec.settings.aggregation,
                header=header,
                parameters=package_to_proto(spec.package).parameters,
                out=out,
            )
        finally:
            if reader is not None:
                await asyncio.to_thread(reader.close)
        self._trusted[job_id] = finished.sha256
        return CheckpointFile(
            str(out.relative_to(self._root)), finished.sha256, finished.size, finished.no_units
        )

    async def upload(
        self, job_id: str, spec: JobSpec, summary: RoundSummary, file: CheckpointFile
    ) -> CheckpointRef:
        """Writes a checkpoint to storage and records it there. Raises what storage answers."""
        await write_blob(self._storage.channel, self._root / file.name, file.sha256, file.size)
        request = storage_service_pb2.PutCheckpointRequest(
            job_id=job_id,
            blob=file_to_proto(file),
            expectation=expectation_to_proto(spec, summary.round),
        )
        return checkpoint_from_proto(await self._storage.put_checkpoint(request))

    async def discard(self, job_id: str, round_number: int) -> None:
        """Removes the deltas of a finished round, and every checkpoint file but that round's."""
        await self._spill.remove(job_id, round_number)
        keep = self._path(job_id, round_number)
        await asyncio.to_thread(_remove_others, keep)

    async def forget(self, job_id: str) -> None:
        """Removes every file of a job."""
        self._trusted.pop(job_id, None)
        await self._spill.forget(job_id)
        await asyncio.to_thread(shutil.rmtree, self._root / job_id, ignore_errors=True)

    async def jobs(self) -> list[str]:
        """Returns the jobs that files are there of."""
        here = await asyncio.to_thread(
            lambda: [path.name for path in self._root.iterdir()] if self._root.is_dir() else []
        )
        return sorted({*here, *await self._spill.jobs()})

    async def recover(self, job_id: str, round_number: int, accepted: list[DeltaFile]) -> set[str]:
        """Tidies the deltas of a job's open round; returns the names of those that are gone or damaged."""
        return await self._spill.recover(job_id, round_number, accepted)


def _remove_others(keep: Path) -> None:
    for path in keep.parent.iterdir():
        if path != keep:
            path.unlink(missing_ok=True)
