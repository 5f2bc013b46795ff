"""Going on from a checkpoint, over real servers: five and five rounds are ten; what can't go on is told."""

from pathlib import Path
from typing import Any

import pytest

from covey.v1 import checkpoint_pb2, common_pb2, job_pb2
from covey.v1 import coordinator_service_pb2 as pb
from covey_coordinator.domain.plan import sequence_seed
from covey_kit.blobs import read_bytes, write_bytes
from covey_kit.caller import Role
from covey_kit.errors import (
    AlreadyExists,
    CoveyError,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Reason,
)
from support.coordinator import MODULE, Mesh, chunk_bytes, dataset, digest, mesh, uploaded
from support.eventually import eventually
from support.experience_jobs import completed, create_experience, player
from support.scripted_participant import participants
from support.storage import join_file, split_file

AVG = job_pb2.AggregationSettings()
ADAM = job_pb2.AggregationSettings(strategy=job_pb2.AGGREGATION_STRATEGY_FED_ADAM)
COUNTS = (5, 6, 7, 8, 9)


async def trained(running: Mesh, rounds: int, **settings: Any) -> str:
    """Trains a dataset job with two chunks a round for so many rounds; returns its id."""
    job_id = await running.create(COUNTS, target_round=rounds, **settings)
    await running.begin(job_id, 1)
    await completed(running, job_id)
    return job_id


async def continued(running: Mesh, source: str, target: int, **changes: Any) -> job_pb2.Job:
    """Continues a job; returns the new one as it was made."""
    request = pb.ContinueJobRequest(source_job_id=source, target_round=target, **changes)
    found: job_pb2.Job = (await running.call("ContinueJob", request)).job
    return found


async def finished(running: Mesh, job_id: str) -> list[str]:
    """Starts a continued job once its participants accepted, and returns its checkpoints' digests."""

    async def accepted() -> bool:
        job = await running.job(job_id)
        return all(p.invitation == job_pb2.INVITATION_STATE_ACCEPTED for p in job.participants)

    await eventually(accepted)
    await running.call("StartJob", pb.StartJobRequest(job_id=job_id))
    return await completed(running, job_id)


async def export(running: Mesh, job_id: str, round_number: int) -> bytes:
    """Returns the checkpoint file of a round."""
    digest_of = {r.round: r.checkpoint.sha256 for r in await running.rounds(job_id)}
    async with running.channel(Role.OWNER, address=running.storage_address) as channel:
        return await read_bytes(channel, digest_of[round_number], max_bytes=1 << 20)


async def upload(running: Mesh, data: bytes) -> common_pb2.BlobRef:
    """Writes a file to storage and returns its key."""
    async with running.channel(Role.OWNER, address=running.storage_address) as channel:
        await write_bytes(channel, data)
    return common_pb2.BlobRef(sha256=digest(data), size_bytes=len(data))


async def refused(running: Mesh, source: str, target: int, **changes: Any) -> dict[str, str]:
    """What is wrong with a continuation, by field."""
    with pytest.raises(InvalidArgument) as caught:
        await continued(running, source, target, **changes)
    return {v.field: v.description for v in caught.value.violations}


@pytest.mark.parametrize("aggregation", [AVG, ADAM], ids=["FedAvg", "FedAdam"])
async def test_five_and_five_rounds_are_ten(tmp_path: Path, aggregation: job_pb2.AggregationSettings) -> None:
    """Continued from round 5 to 10 a job makes the bytes of one that went there at once, moments and all."""
    async with mesh(tmp_path) as running, participants(running.address, 2) as devices:
        whole = await completed(running, await trained(running, 10, aggregation=aggregation, seed=3))
        source = await trained(running, 5, aggregation=aggregation, seed=3)
        made = await continued(running, source, 10)
        new = made.job_id

        assert await finished(running, new) == whole[5:]
        job = await running.job(new)
        assert (job.lineage.source_job_id, job.lineage.round, job.lineage.new_queue) == (source, 5, False)
        assert job.lineage.checkpoint_sha256 == whole[5]
        assert (job.progress.rounds_done, job.progress.rounds_wanted) == (10, 10)
        assert job.display_name == made.display_name == "small"
        assert {p.participant_id for p in job.participants} == {d.name for d in devices}
        rounds = await running.rounds(new)
        assert [r.round for r in rounds] == [5, 6, 7, 8, 9, 10]
        assert not any(d.errors for d in devices)


async def test_an_experience_job_goes_on_in_its_sequence(tmp_path: Path) -> None:
    """Two and three rounds are five; a new sequence keeps the weights and begins at unit 0, seeded anew."""
    async with mesh(tmp_path) as running, participants(running.address, 2) as devices:
        whole_id = await create_experience(running, epochs=5, seed=8)
        await running.begin(whole_id, 2)
        whole = await completed(running, whole_id)
        source = await create_experience(running, epochs=2, seed=8)
        await running.begin(source, 2)
        await completed(running, source)

        resumed = (await continued(running, source, 5)).job_id
        assert await finished(running, resumed) == whole[2:]

        fresh = (await continued(running, source, 5, new_queue=True)).job_id
        found = await finished(running, fresh)
        assert found[0] == whole[2]
        assert not set(found[1:]) & set(whole)
        work = {(a.round, a.index): a.unit_range for d in devices for a in d.assignments if a.job_id == fresh}
        assert work[3, 0].first_unit == 0
        assert {w.sequence_seed for w in work.values()} == {sequence_seed(8, 2)}
        assert sequence_seed(8, 2) != sequence_seed(8, 0)
        progress = (await running.job(resumed)).progress
        assert (progress.units_done, progress.units_wanted) == (18, 18)


async def test_a_job_forks_from_any_round_with_other_settings(tmp_path: Path) -> None:
    """From an earlier round, with another learning rate, strategy and number of assignments."""
    async with mesh(tmp_path) as running, participants(running.address, 2) as devices:
        source = await trained(running, 5)
        before = await running.rounds(source)
        settings = job_pb2.JobSettings(learning_rate=0.3, assignments_per_round=3, aggregation=ADAM)
        fork = await continued(running, source, 4, round=2, settings=settings, display_name="fork")

        assert fork.display_name == "fork"
        assert fork.settings.learning_rate == 0.3
        assert fork.settings.aggregation.beta2 == 0.99
        assert fork.lineage.checkpoint_sha256 == before[2].checkpoint.sha256
        found = await finished(running, fork.job_id)
        assert found[0] == before[2].checkpoint.sha256
        assert found[1] != before[3].checkpoint.sha256
        sizes = [
            len({a.index for d in devices for a in d.assignments if a.job_id == fork.job_id and a.round == r})
            for r in (3, 4)
        ]
        # One chunk of the pass was left after two rounds of two; the next pass is cut in threes.
        assert sizes == [1, 3]


async def test_another_dataset_needs_a_new_queue(tmp_path: Path) -> None:
    """Without it each difference is named; with it the weights stay and the queue is the new dataset's."""
    async with mesh(tmp_path) as running, participants(running.address, 1) as (device,):
        source = await trained(running, 2)
        await running.upload(6)
        other = dataset((5, 60, 7, 8, 9, 3))
        files = [uploaded(f"c{n}.bin", chunk_bytes(n)) for n in range(6)]

        found = await refused(running, source, 4, dataset=other, files=files)
        assert set(found) == {"dataset.chunks", "dataset.chunks[1].examples"}
        assert "the source job has 5 chunks, this dataset 6" in found["dataset.chunks"]
        assert "'c1': the source job has 6, this dataset 60" in found["dataset.chunks[1].examples"]

        made = await continued(running, source, 4, dataset=other, files=files, new_queue=True)
        assert made.lineage.new_queue
        await finished(running, made.job_id)
        chunks = [c.id for a in device.assignments if a.job_id == made.job_id for c in a.chunks.chunks]
        assert len(set(chunks)) == 4


async def test_the_same_dataset_may_be_given(tmp_path: Path) -> None:
    """An equal manifest is the same dataset: the queue goes on."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        whole = await completed(running, await trained(running, 4))
        source = await trained(running, 2)
        made = await continued(running, source, 4, dataset=dataset(COUNTS))

        assert await finished(running, made.job_id) == whole[2:]


async def test_what_cannot_go_on_is_told_why_all_at_once(tmp_path: Path) -> None:
    """Target, epochs, the queue's seed and a bound are named together, with both numbers."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        source = await trained(running, 3)
        settings = job_pb2.JobSettings(epochs=2, seed=9, learning_rate=2.0)
        settings.experience.units_per_assignment = 3

        found = await refused(running, source, 3, settings=settings)
        assert found["target_round"] == "expected a round above the checkpoint's, which is 3; found 3"
        assert "target_round says how far" in found["settings.epochs"]
        assert found["settings.seed"] == (
            "expected 0, which orders the queue that goes on, or new_queue; found 9"
        )
        assert "expected 0 to 1" in found["settings.learning_rate"]
        assert "chunks of a dataset" in found["settings.experience"]
        assert len(found) == 5


async def test_an_unknown_source_is_not_found(tmp_path: Path) -> None:
    """No such job, and no such round."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        with pytest.raises(NotFound) as caught:
            await continued(running, "nope", 3)
        assert caught.value.reason is Reason.JOB_NOT_FOUND
        source = await running.create(COUNTS)
        with pytest.raises(NotFound, match="has no checkpoint yet") as caught:
            await continued(running, source, 3)
        assert caught.value.reason is Reason.CHECKPOINT_NOT_FOUND
        with pytest.raises(NotFound, match="of round 7"):
            await continued(running, source, 9, round=7)


async def test_an_uploaded_checkpoint_goes_on(tmp_path: Path) -> None:
    """A file that was exported from another mesh continues a job of the same package, in its own queue."""
    async with mesh(tmp_path / "one") as running, participants(running.address, 1):
        whole_id = await trained(running, 4, seed=6)
        whole = await completed(running, whole_id)
        original = (await running.rounds(whole_id))[2]
        exported = await export(running, whole_id, 2)
    async with mesh(tmp_path / "two") as running, participants(running.address, 1):
        source = await running.create(COUNTS, target_round=1)
        await running.invite_all(source, 1)
        blob = await upload(running, exported)
        wrong = await refused(running, source, 4, checkpoint=blob, round=3)
        assert wrong == {"round": "expected 2, the checkpoint's round; found 3"}

        made = await continued(running, source, 4, checkpoint=blob)
        assert made.settings.seed == 6
        assert await finished(running, made.job_id) == whole[2:]
        base = (await running.rounds(made.job_id))[0]
        assert (base.round, base.units, base.checkpoint) == (2, original.units, original.checkpoint)
        assert list(base.metrics) == list(original.metrics)


async def test_a_damaged_checkpoint_is_refused_with_every_problem(tmp_path: Path) -> None:
    """Weights that were changed and another package's version and module are all said at once."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        source = await trained(running, 2)
        outer, inner, body = split_file(await export(running, source, 2))
        inner |= {"packageVersion": "9", "moduleSha256": "b" * 64}
        blob = await upload(running, join_file(outer, inner, bytes([body[0] ^ 1]) + body[1:]))

        with pytest.raises(InvalidArgument) as caught:
            await continued(running, source, 4, checkpoint=blob)
        assert caught.value.reason is Reason.CHECKPOINT_INVALID
        fields = [v.field.partition("[")[0] for v in caught.value.violations]
        assert fields.count("checkpoint.package") >= 1
        assert "checkpoint.weights_digest" in fields
        text = " ".join(v.description for v in caught.value.violations)
        assert "b" * 64 in text
        assert digest(MODULE) in text
        with pytest.raises(InvalidArgument):
            await continued(running, source, 4, checkpoint=await upload(running, b"no checkpoint at all"))
        gone = common_pb2.BlobRef(sha256="c" * 64, size_bytes=8)
        with pytest.raises(FailedPrecondition) as missing:
            await continued(running, source, 4, checkpoint=gone)
        assert missing.value.reason is Reason.BLOB_MISSING


async def test_version_1_goes_on_with_a_new_queue_only(tmp_path: Path) -> None:
    """It doesn't say where its queue stands; with a new one it trains on from its weights."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        source = await trained(running, 2)
        outer, inner, body = split_file(await export(running, source, 2))
        kept = {
            *("packageName", "packageVersion", "moduleSha256", "round"),
            *("weightsSha256", "weightCount", "parameterNames", "metrics"),
        }
        old = {"formatVersion": 1, **{key: value for key, value in inner.items() if key in kept}}
        blob = await upload(running, join_file(outer, old, body))

        found = await refused(running, source, 4, checkpoint=blob)
        assert set(found) == {"new_queue"}
        assert "version 1 doesn't say where its queue stands" in found["new_queue"]
        made = await continued(running, source, 4, checkpoint=blob, new_queue=True)
        assert len(await finished(running, made.job_id)) == 3


async def test_auxiliary_weights_must_be_the_checkpoints(tmp_path: Path) -> None:
    """Other weights under the same name are refused, with both digests."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        source = await create_experience(running, epochs=1)
        await running.begin(source, 1)
        await completed(running, source)
        other = b"another opponent"
        await upload(running, other)
        given = uploaded("opponent.bin", other)
        found = await refused(running, source, 3, files=[given])
        declared = (await completed_header(running, source)).auxiliary_weights[0].sha256
        text = found["package.auxiliary_weights[0].sha256"]
        assert declared in text
        assert digest(other) in text

        changed = player()
        changed.auxiliary_weights[0].sha256 = digest(other)
        changed.auxiliary_weights[0].bytes = len(other)
        found = await refused(running, source, 3, files=[given], package=changed)
        assert found == {
            "package.auxiliary_weights['opponent']": f"the checkpoint was trained with {declared}, "
            f"the package has {digest(other)}"
        }


async def completed_header(running: Mesh, job_id: str) -> checkpoint_pb2.CheckpointHeader:
    """The header of a job's first checkpoint."""
    request = pb.CoordinatorServiceListCheckpointsRequest(job_id=job_id)
    header: checkpoint_pb2.CheckpointHeader = (
        (await running.call("ListCheckpoints", request)).checkpoints[0].header
    )
    return header


async def test_continuing_is_idempotent_and_can_be_tried(tmp_path: Path) -> None:
    """validate_only makes nothing; the same request id gives the same job; another request is refused."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        source = await trained(running, 2)
        tried = await continued(running, source, 4, validate_only=True, request_id="once")
        assert (tried.job_id, tried.progress.rounds_wanted, tried.lineage.round) == ("", 4, 2)
        first = await continued(running, source, 4, request_id="once")
        again = await continued(running, source, 4, request_id="once")

        assert first.job_id == again.job_id
        with pytest.raises(AlreadyExists):
            await continued(running, source, 5, request_id="once")
        assert len((await running.call("ListJobs", pb.ListJobsRequest())).jobs) == 2


async def test_the_base_outlives_its_job(tmp_path: Path) -> None:
    """The source may be deleted: the new job holds its base, goes on after a restart, frees it at last."""
    running = Mesh(tmp_path)
    await running.start()
    async with participants(running.address, 1) as (device,):
        whole = await completed(running, await trained(running, 4))
        source = await trained(running, 2)
        new = (await continued(running, source, 4)).job_id
        await running.call("DeleteJob", pb.DeleteJobRequest(job_id=source))
        await running.stop()
        await running.start()
        await device.join()

        job = await running.job(new)
        assert (job.lineage.source_job_id, job.latest_round.round) == (source, 2)
        assert await finished(running, new) == whole[2:]
        answer = await running.call("RunValidation", pb.RunValidationRequest(job_id=new, round=2))
        assert answer.round == 2

        async def validated() -> bool:
            return bool((await running.rounds(new))[0].validation_metrics)

        await eventually(validated)
        for job_id in [j.job_id for j in (await running.call("ListJobs", pb.ListJobsRequest())).jobs]:
            await running.call("DeleteJob", pb.DeleteJobRequest(job_id=job_id))
        assert (await running.inventory()).blob_count == 0
    await running.stop()


async def test_a_continued_job_can_be_continued(tmp_path: Path) -> None:
    """Two and one and one rounds are four."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        whole = await completed(running, await trained(running, 4))
        second = (await continued(running, await trained(running, 2), 3)).job_id
        await finished(running, second)
        third = (await continued(running, second, 4)).job_id

        assert await finished(running, third) == whole[3:]
        with pytest.raises(CoveyError, match="of round 1"):
            await continued(running, second, 9, round=1)
