"""A job from its creation to its last checkpoint, over real servers."""

from pathlib import Path

from covey.v1 import job_pb2
from support.coordinator import mesh
from support.scripted_participant import participants


async def test_a_job_runs_to_its_end(tmp_path: Path) -> None:
    """A created, accepted and started job makes the initial weights and every round, and completes."""
    async with mesh(tmp_path) as running, participants(running.address, 2):
        job_id = await running.create((5, 6, 7), epochs=2, validation_interval=2)
        await running.begin(job_id, 2)

        job = await running.ended(job_id)

        assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure
        assert 4 == job.progress.rounds_done == job.progress.rounds_wanted
        assert (job.progress.passes_done, job.progress.passes_wanted) == (2, 2)
        assert job.progress.units_done == 36
        rounds = await running.rounds(job_id)
        assert [r.round for r in rounds] == [0, 1, 2, 3, 4]
        assert [bool(r.validation_metrics) for r in rounds] == [False, False, True, False, True]
        assert len({r.weights_sha256 for r in rounds}) == 5
