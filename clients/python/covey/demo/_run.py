"""The demo from its first process to its last number."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from covey.client import Client, connect
from covey.client._jobs import ENDED
from covey.demo._backends import last_runs, used
from covey.demo._mesh import DemoMesh
from covey.demo._view import View
from covey.packages import Dataset, Package, load, load_dataset
from covey.v1 import checkpoint_pb2, job_pb2
from covey.words import mean
from covey_kit.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    NotFound,
    Reason,
    Unavailable,
)

__all__ = ["DEFAULT_ROUNDS", "DemoOptions", "DemoResult", "demo_model", "run_demo"]

DEFAULT_ROUNDS = 16
JOIN_SECONDS = 120.0
"""Longest wait for the participants to join and to accept."""
STALL_SECONDS = 120.0
"""Longest time in which nothing gets done."""
POLL_SECONDS = 0.1
DONE = job_pb2.ASSIGNMENT_STATUS_DONE

T = TypeVar("T")


@dataclass(frozen=True)
class DemoOptions:
    """What to run.

    Attributes:
        folder: where the processes' state goes.
        checkpoint: where the last checkpoint is exported to.
        participants: devices, each a process.
        rounds: the final round.
        seed: seeds everything random.
        pid_file: see `DemoMesh`.
        backend: what the devices would rather run on: `auto`, `cpu` or `gpu`.
    """

    folder: Path
    checkpoint: Path
    participants: int = 3
    rounds: int = DEFAULT_ROUNDS
    seed: int = 0
    pid_file: Path | None = None
    backend: str = "cpu"


@dataclass(frozen=True)
class DemoResult:
    """What came of it.

    Attributes:
        package: name and version of the package.
        unit: what it counts in, singular.
        participants: devices that took part.
        rounds: rounds done.
        accuracy: held-out accuracy of the last round.
        backend: what trained the last round; several are joined with `+`.
        adapter: the GPU's name; None: none was used.
        fallback_reason: why not the GPU; None: nothing to explain.
        fallback_message: the same in words.
        checkpoint_sha256: SHA-256 of the exported file.
        weights_sha256: SHA-256 of the weights in it.
        checkpoint_path: where it lies.
        seconds: from the first process to the last number.
        training_seconds: from the job's start to its end.
        history: one entry a round: round, loss, accuracy, held_out_accuracy, units, seconds; None: not known.
    """

    package: str
    unit: str
    participants: int
    rounds: int
    accuracy: float | None
    backend: str
    adapter: str | None
    fallback_reason: str | None
    fallback_message: str | None
    checkpoint_sha256: str
    weights_sha256: str
    checkpoint_path: str
    seconds: float
    training_seconds: float | None
    history: list[dict[str, Any]] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        """Returns it for programs."""
        return asdict(self)


def demo_model() -> Path:
    """Returns the folder of the package that the demo trains: from the wheel, or from the checkout.

    Raises:
        NotFound: neither is there.
    """
    here = Path(__file__).resolve().parent.parent
    places = [here / "_models" / "digits", *(parent / "models" / "digits" for parent in here.parents)]
    for place in places:
        if (place / "manifest.json").is_file():
            return place
    raise NotFound(
        Reason.DEVICE,
        "the package `digits` isn't part of this installation; run it in a checkout, or install the wheel",
    )


async def run_demo(options: DemoOptions, view: View, on_mesh: Callable[[DemoMesh], None]) -> DemoResult:
    """Runs a mesh on this machine until a model is trained, and takes it down again.

    Args:
        options: what to run.
        view: shows how far it is.
        on_mesh: called with the mesh before its first process starts, for whoever has to end it in a hurry.

    Raises:
        CoveyError: what went wrong, with the reason that the job's state gives.
    """
    began = time.monotonic()
    folder = demo_model()
    package = await asyncio.to_thread(load, folder)
    dataset = await asyncio.to_thread(load_dataset, folder / "data" / "dataset.json", package)
    mesh = DemoMesh(options.folder, options.participants, view.note, options.pid_file, options.backend)
    on_mesh(mesh)
    async with mesh:
        view.note(
            f"coordinator and storage at {mesh.address}, {options.participants} participants, "
            f"state in {options.folder}"
        )
        async with connect(mesh.address, token_file=mesh.token_file) as client:
            work = asyncio.ensure_future(_train(client, mesh, options, view, package, dataset))
            try:
                either: set[asyncio.Future[Any]] = {work, mesh.failure}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    mesh.failure.result()
                job, history, record = await work
                what = used(record.header.backends, await last_runs(mesh.participant_folders()))
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
    last = history[-1] if history else {}
    timed = job.HasField("start_time") and job.HasField("end_time")
    return DemoResult(
        package=f"{package.manifest.name} {package.manifest.version}",
        unit=job.unit,
        participants=options.participants,
        rounds=job.progress.rounds_done,
        accuracy=last.get("held_out_accuracy"),
        backend=what.backend,
        adapter=what.adapter,
        fallback_reason=what.fallback_reason,
        fallback_message=what.message,
        checkpoint_sha256=record.blob.sha256,
        weights_sha256=record.header.weights_sha256,
        checkpoint_path=str(options.checkpoint),
        seconds=round(time.monotonic() - began, 3),
        training_seconds=_seconds(job.start_time, job.end_time) if timed else None,
        history=history,
    )


async def _train(
    client: Client, mesh: DemoMesh, options: DemoOptions, view: View, package: Package, dataset: Dataset
) -> tuple[job_pb2.Job, list[dict[str, Any]], checkpoint_pb2.Checkpoint]:
    ids = await _joined(client, mesh, options.participants)
    settings = job_pb2.JobSettings(target_round=options.rounds, seed=options.seed, validation_interval=1)
    job = await client.jobs.create(package, dataset, settings)
    await _again(lambda: client.participants.invite(job.job_id, ids))
    await _again(lambda: client.participants.accepted(job.job_id, options.participants, timeout=JOIN_SECONDS))
    await _again(lambda: client.jobs.start(job.job_id))
    view.note(
        f"job {job.job_id}: {len(dataset.manifest.chunks)} chunks, {dataset.example_count:,} "
        f"{job.unit}s, {job.progress.rounds_wanted} rounds"
    )
    job = await _finished(client, job.job_id, view)
    if job.state != job_pb2.JOB_STATE_COMPLETED:
        why = job.failure.message if job.HasField("failure") else "it was stopped"
        raise FailedPrecondition(Reason.JOB_STATE, f"the job didn't complete: {why}")
    history = [_row(one) for one in await _again(lambda: client.jobs.rounds(job.job_id)) if one.round > 0]
    record = await _again(lambda: client.checkpoints.export(job.job_id, options.checkpoint))
    return job, history, record


async def _again(call: Callable[[], Awaitable[T]], patience: float = 30.0) -> T:
    """Makes an idempotent call, again while nobody answers: the coordinator may just be starting again."""
    deadline = time.monotonic() + patience
    while True:
        try:
            return await call()
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(POLL_SECONDS)


async def _joined(client: Client, mesh: DemoMesh, wanted: int) -> list[str]:
    """Waits until all participants are connected and returns their ids."""
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        found = await _again(lambda: client.participants.list(connected_only=True))
        if len(found) >= wanted:
            return [one.participant_id for one in found]
        if time.monotonic() >= deadline:
            raise DeadlineExceeded(
                Reason.DEADLINE,
                f"{len(found)} of {wanted} participants joined in {JOIN_SECONDS:.0f} s; "
                f"{mesh.endings() or 'all run'}",
            )
        await asyncio.sleep(POLL_SECONDS)


async def _finished(client: Client, job_id: str, view: View) -> job_pb2.Job:
    """Follows the job until it has ended and its validations are done."""
    patience = _Patience(job_id)
    states = client.jobs.watch(job_id)
    while True:
        try:
            async with asyncio.timeout(patience.left):
                job = await anext(states)
        except TimeoutError:
            patience.give_up()
        except StopAsyncIteration:
            break
        patience.saw(job)
        view.job(job)
    # The watch ends with the job; what is still to be validated is asked for.
    while True:
        job = await _again(lambda: client.jobs.get(job_id))
        patience.saw(job)
        view.job(job)
        if job.state in ENDED and not job.pending_validation_rounds:
            return job
        if patience.left <= 0:
            patience.give_up()
        await asyncio.sleep(POLL_SECONDS)


class _Patience:
    """Ends the wait for a job in which nothing gets done, with what the job's state says of it."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._job: job_pb2.Job | None = None
        self._done: tuple[object, ...] = ()
        self._since = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds until it is over, unless something gets done."""
        return max(0.0, self._since + STALL_SECONDS - time.monotonic())

    def saw(self, job: job_pb2.Job) -> None:
        """Takes a new state: patience begins anew when something was done since the last one."""
        self._job = job
        progress = job.progress
        finished = sum(one.status == DONE for one in job.current_round.assignments)
        done = (
            *(job.state, progress.rounds_done, progress.round_units_done, finished),
            len(job.pending_validation_rounds),
        )
        if done != self._done:
            self._done, self._since = done, time.monotonic()

    def give_up(self) -> NoReturn:
        """Raises DeadlineExceeded with the reason."""
        why = (_waits(self._job) if self._job is not None else "") or "its state doesn't say why"
        raise DeadlineExceeded(
            Reason.DEADLINE, f"{self._job_id}: nothing got done for {STALL_SECONDS:.0f} s; {why}"
        )


def _waits(job: job_pb2.Job) -> str:
    waits = "; ".join(wait.message for wait in job.waits)
    error = f"last error: {job.last_error.message}" if job.HasField("last_error") else ""
    return "; ".join(part for part in (waits, error) if part)


def _seconds(start: Any, end: Any) -> float:
    return float((end.ToNanoseconds() - start.ToNanoseconds()) / 1e9)


def _row(summary: job_pb2.RoundSummary) -> dict[str, Any]:
    timed = summary.HasField("start_time") and summary.HasField("end_time")
    return {
        "round": summary.round,
        "loss": mean(summary.metrics, "loss"),
        "accuracy": mean(summary.metrics, "accuracy"),
        "held_out_accuracy": mean(summary.validation_metrics, "accuracy"),
        "units": summary.units,
        "seconds": _seconds(summary.start_time, summary.end_time) if timed else None,
    }
