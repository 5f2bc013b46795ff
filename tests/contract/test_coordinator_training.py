"""A job from its creation to its last checkpoint, over real servers: same job, same bytes."""

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from covey.v1 import coordinator_service_pb2, job_pb2, work_service_pb2
from covey_kit.errors import Aborted, Reason
from support.coordinator import Mesh, ShiftClock, mesh
from support.eventually import eventually
from support.scripted_participant import (
    Outcome,
    ScriptedParticipant,
    Weights,
    compute,
    metric,
    participants,
)

Assignment = work_service_pb2.Assignment
ADAM = job_pb2.AggregationSettings(strategy=job_pb2.AGGREGATION_STRATEGY_FED_ADAM)


async def train(running: Mesh, **settings: object) -> list[str]:
    """Runs a job with everyone there and returns the digests of its checkpoints."""
    job_id = await running.create((5, 6, 7, 0), assignments_per_round=3, epochs=2, **settings)
    await running.begin(job_id, 1)
    return await checkpoints(running, job_id)


async def checkpoints(running: Mesh, job_id: str) -> list[str]:
    """Waits until a job is completed and returns the digests of its checkpoints."""
    job = await running.ended(job_id)
    assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure
    return [r.checkpoint.sha256 for r in await running.rounds(job_id)]


async def undisturbed(folder: Path, **settings: object) -> list[str]:
    """The digests that the job has when one participant does everything."""
    async with mesh(folder) as running, participants(running.address, 1):
        return await train(running, **settings)


async def test_a_job_runs_to_its_end(tmp_path: Path) -> None:
    """A created, accepted and started job makes the initial weights and every round, and completes."""
    async with mesh(tmp_path) as running, participants(running.address, 2):
        job_id = await running.create((5, 6, 7), epochs=2, validation_interval=2)
        await running.begin(job_id, 2)

        job = await running.ended(job_id)

        assert job.state == job_pb2.JOB_STATE_COMPLETED, job.failure
        assert job.progress.rounds_done == job.progress.rounds_wanted == 4
        assert (job.progress.passes_done, job.progress.passes_wanted) == (2, 2)
        assert job.progress.units_done == 36
        assert not job.waits
        rounds = await running.rounds(job_id)
        assert [r.round for r in rounds] == [0, 1, 2, 3, 4]
        assert [bool(r.validation_metrics) for r in rounds] == [False, False, True, False, True]
        assert len({r.weights_sha256 for r in rounds}) == 5


async def test_bytes_do_not_depend_on_who_did_what_when(tmp_path: Path) -> None:
    """Three participants that finish in random order make the same checkpoints as one alone."""
    expected = await undisturbed(tmp_path / "one", aggregation=ADAM)
    chance = random.Random(5)

    async def dawdle(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        await asyncio.sleep(chance.random() * 0.1)
        return compute(assignment, base)

    async with mesh(tmp_path / "three") as running, participants(running.address, 3, dawdle):
        assert await train(running, aggregation=ADAM) == expected


async def test_settings_that_make_no_difference_make_no_difference(tmp_path: Path) -> None:
    """Timeouts, names, validations and how far the training goes leave no trace in a checkpoint."""
    expected = await undisturbed(tmp_path / "one")

    async with mesh(tmp_path / "other") as running, participants(running.address, 2):
        job_id = await running.create(
            (5, 6, 7, 0), assignments_per_round=3, target_round=3, validation_interval=1, min_participants=2
        )
        await running.begin(job_id, 2)
        assert await checkpoints(running, job_id) == expected[:4]


async def test_a_restart_in_the_middle_of_a_round_changes_nothing(tmp_path: Path) -> None:
    """Stopped with results of a round accepted and one out, it goes on and makes the same bytes; what a
    participant still has in hand stays its own."""
    expected = await undisturbed(tmp_path / "one")
    running = Mesh(tmp_path / "two")
    await running.start()
    release = {2: asyncio.Event(), 3: asyncio.Event()}
    holding: set[int] = set()

    async def stall(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        if (assignment.round, assignment.index) in {(2, 0), (3, 1)}:
            holding.add(assignment.round)
            await release[assignment.round].wait()
        return compute(assignment, base)

    async with participants(running.address, 2, stall) as devices:
        job_id = await running.create((5, 6, 7, 0), assignments_per_round=3, epochs=2)
        await running.begin(job_id, 2)
        for number in (2, 3):

            async def one_is_out(number: int = number) -> bool:
                opened = (await running.job(job_id)).current_round
                done = sum(a.status == job_pb2.ASSIGNMENT_STATUS_DONE for a in opened.assignments)
                return number in holding and opened.round == number and done == len(opened.assignments) - 1

            await eventually(one_is_out)
            await running.stop()
            await running.start()
            assert (await running.job(job_id)).current_round.round == number
            await asyncio.gather(*(device.join() for device in devices))
            assert await one_is_out()
            release[number].set()
        assert await checkpoints(running, job_id) == expected
        assert {a.attempt for d in devices for a in d.assignments} == {1}
    await running.stop()


async def test_a_restart_after_which_nobody_comes_back_changes_nothing(tmp_path: Path) -> None:
    """What was out at a restart goes to others when its participant doesn't return; accepted results stay."""
    expected = await undisturbed(tmp_path / "one")
    running = Mesh(tmp_path / "two")
    await running.start()

    async def never(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome | None:
        return None if (assignment.round, assignment.index) == (1, 1) else compute(assignment, base)

    async with participants(running.address, 2, never):
        job_id = await running.create((5, 6, 7, 0), assignments_per_round=3, epochs=2)
        await running.begin(job_id, 2)

        async def one_is_out() -> bool:
            opened = (await running.job(job_id)).current_round
            return [a.status for a in opened.assignments] == [3, 2, 3]

        await eventually(one_is_out)
    await running.stop()
    await running.start()
    other = ScriptedParticipant(running.address, "p3")
    await other.join()
    await running.invite_all(job_id, 3)
    assert await checkpoints(running, job_id) == expected
    assert [a.index for a in other.assignments if a.round == 1] == [1]
    await other.die()
    await running.stop()


async def test_a_round_without_units_leaves_the_weights(tmp_path: Path) -> None:
    """When every result has zero units the round is made, says so, and the weights stay as they were."""
    async with mesh(tmp_path) as running, participants(running.address, 1):
        job_id = await running.create((0, 0), epochs=1)
        await running.begin(job_id, 1)
        await running.ended(job_id)

        first, second = await running.rounds(job_id)

        assert (first.no_units, second.no_units) == (False, True)
        assert first.weights_sha256 == second.weights_sha256
        assert second.units == 0
        assert not second.metrics[0].HasField("sum")


async def test_a_delta_that_is_not_finite_is_refused_and_fails_the_package(tmp_path: Path) -> None:
    """NaN never touches the sum: the attempt fails, and the third time the job fails with that error."""

    async def nan(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        outcome = compute(assignment, base)
        assert outcome.delta is not None
        if assignment.round == 1:
            outcome.delta[3] = np.nan
        return outcome

    async with mesh(tmp_path) as running, participants(running.address, 1, nan) as (device,):
        job_id = await running.create((5,))
        await running.begin(job_id, 1)
        job = await running.ended(job_id)

        assert job.state == job_pb2.JOB_STATE_FAILED
        assert job.failure.reason == 47  # DELTA_NOT_FINITE
        assert "element 3" in job.failure.message
        assert "3 times on the only participants" in job.failure.message
        assert [e.reason for e in device.errors] == [Reason.DELTA_NOT_FINITE] * 3
        assert job.participants[0].failures == 3


async def test_a_package_that_fails_on_three_participants_fails_the_job(tmp_path: Path) -> None:
    """Three different devices on which the package traps are enough; its own words are the job's failure."""

    async def trap(me: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        if assignment.round == 0:
            return compute(assignment, base)
        return Outcome(failure=f"unreachable on {me.name}", package_fault=True)

    async with mesh(tmp_path) as running, participants(running.address, 4, trap) as devices:
        job_id = await running.create((5,))
        await running.begin(job_id, 4)
        job = await running.ended(job_id)

        assert job.state == job_pb2.JOB_STATE_FAILED
        assert "failed on 3 different participants" in job.failure.message
        assert "unreachable on p" in job.failure.message
        tried = [d.name for d in devices for a in d.assignments if a.round == 1]
        assert len(tried) == len(set(tried)) == 3


async def test_a_device_that_fails_is_passed_over(tmp_path: Path) -> None:
    """What failed on one device goes to another that hasn't failed on it, and the job goes on."""

    async def broken(me: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        if me.name == "p1" and assignment.round > 0:
            return Outcome(failure="the disk is full")
        return compute(assignment, base)

    async with mesh(tmp_path) as running, participants(running.address, 2, broken) as (first, _):
        job_id = await running.create((5, 6, 7))
        await running.begin(job_id, 2)
        job = await running.ended(job_id)

        assert job.state == job_pb2.JOB_STATE_COMPLETED
        assert "the disk is full" in job.last_error.message
        tried = [a.assignment_id for a in first.assignments if a.round > 0]
        assert len(tried) == len(set(tried))


async def test_the_one_device_that_failed_gets_another_try(tmp_path: Path) -> None:
    """When there is nobody else, an assignment comes back after a moment, and success then counts."""
    failures = iter([True, True, False])

    async def flaky(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        if assignment.round == 1 and next(failures):
            return Outcome(failure="out of memory, for now")
        return compute(assignment, base)

    async with mesh(tmp_path) as running, participants(running.address, 1, flaky):
        job_id = await running.create((5,))
        await running.begin(job_id, 1)

        assert (await running.ended(job_id)).state == job_pb2.JOB_STATE_COMPLETED


async def test_silence_costs_the_assignment(tmp_path: Path) -> None:
    """Who says nothing for silence_timeout loses its assignment; its late result harms nothing."""
    clock = ShiftClock()
    kept: list[tuple[Assignment, Weights | None]] = []

    async def mute(me: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome | None:
        if me.name == "p1" and assignment.round == 1:
            kept.append((assignment, base))
            return None
        if assignment.round == 1:
            await asyncio.wait_for(waiting.wait(), 10)
        return compute(assignment, base)

    waiting = asyncio.Event()
    async with mesh(tmp_path, clock=clock) as running, participants(running.address, 2, mute) as (p1, p2):
        job_id = await running.create((5, 6))
        await running.begin(job_id, 2)
        await eventually(lambda: kept)
        await eventually(lambda: any(a.round == 1 for a in p2.assignments))
        clock.shift += 14
        for a in p2.assignments[-1:]:
            await p2.progress(a)
        job = await running.job(job_id)
        assert any("round 1 waits for p1" in w.message and w.HasField("until") for w in job.waits)
        clock.shift += 2
        waiting.set()
        assert (await running.ended(job_id)).state == job_pb2.JOB_STATE_COMPLETED
        assert p1.of_kind("cancel")[0].assignment_id == kept[0][0].assignment_id

        late = compute(*kept[0])
        assert late.delta is not None
        with pytest.raises(Aborted, match="drop it"):
            await p1.push(kept[0][0], late.delta, late.units, late.metrics)
        job = await running.job(job_id)
        assert "silence_timeout" in job.last_error.message


async def test_reports_do_not_stretch_the_deadline(tmp_path: Path) -> None:
    """assignment_timeout holds whatever the participant says."""
    clock = ShiftClock()

    async def slow(me: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome | None:
        first = len([a for a in me.assignments if a.round == 1]) == 1
        return None if me.name == "p1" and assignment.round == 1 and first else compute(assignment, base)

    async with mesh(tmp_path, clock=clock) as running, participants(running.address, 2, slow) as (p1, _):
        settings = job_pb2.JobSettings()
        settings.assignment_timeout.FromSeconds(30)
        settings.silence_timeout.FromSeconds(20)
        job_id = await running.create(
            (5, 6),
            assignment_timeout=settings.assignment_timeout,
            silence_timeout=settings.silence_timeout,
        )
        await running.begin(job_id, 2)
        mine = await eventually(lambda: [a for a in p1.assignments if a.round == 1])
        clock.shift += 14
        await p1.progress(mine[0])
        clock.shift += 14
        answer = await p1.progress(mine[0])
        assert answer.lease_expire_time.ToSeconds() <= mine[0].deadline.ToSeconds() + 1
        clock.shift += 4

        job = await running.ended(job_id)
        assert job.state == job_pb2.JOB_STATE_COMPLETED
        assert "assignment_timeout" in job.last_error.message


async def test_a_killed_participant_is_replaced_at_once(tmp_path: Path) -> None:
    """When a command stream breaks for good, its assignment goes to another after a short grace."""

    async def stuck(me: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome | None:
        return None if me.name == "p1" and assignment.round == 1 else compute(assignment, base)

    expected = await undisturbed(tmp_path / "one")
    async with mesh(tmp_path / "two") as running, participants(running.address, 2, stuck) as (p1, _):
        job_id = await running.create((5, 6, 7, 0), assignments_per_round=3, epochs=2)
        await running.begin(job_id, 2)
        await eventually(lambda: any(a.round == 1 for a in p1.assignments))
        await p1.die()

        assert await checkpoints(running, job_id) == expected
        job = await running.job(job_id)
        assert not job.HasField("last_error")


async def test_two_jobs_at_once_share_the_participants(tmp_path: Path) -> None:
    """Two jobs run side by side; neither changes the other's bytes."""
    expected = await undisturbed(tmp_path / "one")
    async with mesh(tmp_path / "two") as running, participants(running.address, 2):
        jobs = [
            await running.create((5, 6, 7, 0), assignments_per_round=3, epochs=2),
            await running.create((5, 6, 7, 0), assignments_per_round=3, epochs=2),
        ]
        for job_id in jobs:
            await running.begin(job_id, 2)

        for job_id in jobs:
            assert await checkpoints(running, job_id) == expected


async def test_pause_keeps_what_was_accepted(tmp_path: Path) -> None:
    """Pausing takes back what is out and keeps accepted results; resuming goes on there."""
    expected = await undisturbed(tmp_path / "one")
    hold = asyncio.Event()

    async def stall(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        if assignment.round == 1 and assignment.index == 1 and assignment.attempt == 1:
            await hold.wait()
        return compute(assignment, base)

    async with mesh(tmp_path / "two") as running, participants(running.address, 1, stall) as (device,):
        job_id = await running.create((5, 6, 7, 0), assignments_per_round=3, epochs=2)
        await running.begin(job_id, 1)
        await eventually(lambda: device.assignments and device.assignments[-1].index == 1)
        request = coordinator_service_pb2.PauseJobRequest(job_id=job_id)
        paused = (await running.call("PauseJob", request)).job
        assert paused.state == job_pb2.JOB_STATE_PAUSED
        assert [a.status for a in paused.current_round.assignments] == [3, 1, 1]
        assert "until its owner resumes it" in paused.waits[0].message
        await eventually(lambda: device.of_kind("cancel"))
        hold.set()
        await eventually(lambda: device.errors)
        assert device.errors[0].reason is Reason.ASSIGNMENT_LOST

        await running.call("ResumeJob", coordinator_service_pb2.ResumeJobRequest(job_id=job_id))
        assert await checkpoints(running, job_id) == expected
        assert sum(a.round == 1 and a.index == 0 for a in device.assignments) == 1


async def test_metrics_are_weighted_by_their_counts(tmp_path: Path) -> None:
    """A round's metrics add up sums and counts; a report without a sum adds nothing."""
    sums = {0: metric("loss", 3.0, 4), 1: metric("loss", None, 0), 2: metric("loss", 1.5, 2)}

    async def fixed(_: ScriptedParticipant, assignment: Assignment, base: Weights | None) -> Outcome:
        outcome = compute(assignment, base)
        if assignment.round:
            outcome.metrics = [sums[assignment.index]]
        return outcome

    async with mesh(tmp_path) as running, participants(running.address, 2, fixed):
        job_id = await running.create((5, 6, 7), assignments_per_round=3)
        await running.begin(job_id, 2)
        await running.ended(job_id)

        (merged,) = (await running.rounds(job_id))[1].metrics
        assert (merged.name, merged.sum, merged.count) == ("loss", 4.5, 6)
