"""Going on from a checkpoint: what a continued job is made of, and everything that is wrong with one."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from covey_coordinator.domain.aggregation import Aggregation, Strategy, optimizer_names
from covey_coordinator.domain.making import JobRequest
from covey_coordinator.domain.model import CheckpointRef, RoundRecord
from covey_coordinator.domain.plan import sequence_seed
from covey_coordinator.domain.ports import CheckpointFacts
from covey_coordinator.domain.spec import (
    Chunk,
    JobSpec,
    Origin,
    PackageSpec,
    Settings,
    SettingsRequest,
    UploadedFile,
    manifest_sha256,
)
from covey_coordinator.domain.validate import check_job, check_sequence, raise_all
from covey_kit.errors import Reason, Violation

__all__ = ["Continuation", "adopted_round", "continued_spec"]

_MOST_DIFFERENCES = 100
"""Differences between two datasets that are named one by one."""


@dataclass(frozen=True)
class Continuation(JobRequest):
    """A job to be that goes on from a checkpoint.

    Attributes:
        source_job_id: the job to go on from.
        round: its round; None: the latest, or the uploaded checkpoint's.
        checkpoint: (digest, size) of an uploaded file to go on from; None: the source job's own.
        target_round: the final round.
        settings: those that differ from the source job's.
        chunks: the dataset; None: the source job's.
        package: the package, where files that say how it runs are new; None: the source job's.
        files: files that are new.
        new_queue: begin a new queue or sequence.
    """

    source_job_id: str
    round: int | None
    checkpoint: tuple[str, int] | None
    target_round: int
    settings: SettingsRequest
    chunks: tuple[Chunk, ...] | None
    package: PackageSpec | None
    files: tuple[UploadedFile, ...]
    new_queue: bool


def continued_spec(request: Continuation, source: JobSpec, facts: CheckpointFacts) -> JobSpec:
    """Returns what a continued job is made of.

    Takes microseconds a chunk; call it in a thread for many.

    Args:
        request: what is wanted.
        source: the job that is continued.
        facts: what its checkpoint says of itself; its package is the source's, that was checked.

    Raises:
        InvalidArgument: all violations at once, as of `validate_job`.
    """
    package = request.package or source.package
    chunks = source.chunks if request.chunks is None else request.chunks
    settings = _settings(request, source.settings, facts)
    spec, groups = check_job(package, chunks, settings, _uploads(request, source))
    spec = replace(spec, origin=_origin(request, spec, facts))
    raise_all(
        [
            *groups,
            (Reason.PACKAGE_MISMATCH, _auxiliary(package, facts)),
            (Reason.DATASET_MISMATCH, _data(request, source, spec, facts)),
            (Reason.SETTINGS_MISMATCH, _target(request, facts)),
            (Reason.SETTINGS_MISMATCH, _queue(request, spec, facts)),
            (Reason.SETTINGS_MISMATCH, check_sequence(spec.settings, spec.origin, request.target_round)),
            (Reason.CHECKPOINT_INVALID, _optimizer(facts)),
        ]
    )
    return spec


def adopted_round(facts: CheckpointFacts, checkpoint: CheckpointRef, now: float) -> RoundRecord:
    """Returns the round of an uploaded checkpoint, as far as the file tells of it."""
    return RoundRecord(
        round=facts.round,
        metrics=facts.metrics,
        units=facts.units,
        assignments=0,
        participant_ids=(),
        checkpoint=checkpoint,
        start_time=now,
        end_time=now,
        no_units=False,
    )


def _uploads(request: Continuation, source: JobSpec) -> list[UploadedFile]:
    """Returns the files as they were uploaded: the request's, and the source's of other names."""
    given = {file.file_name for file in request.files}
    before = [UploadedFile(f.file_name, f.size, f.sha256) for _, f in source.package.files()]
    before += [UploadedFile(c.file_name, c.size, c.sha256) for c in source.chunks]
    return [*request.files, *(file for file in before if file.file_name not in given)]


def _settings(request: Continuation, source: Settings, facts: CheckpointFacts) -> SettingsRequest:
    """Returns the source's settings with the request's in their place.

    What orders the queue is the checkpoint's, where it says: an uploaded one may be of another job.
    """
    given, units = request.settings, source.units_per_assignment
    order = source.chunk_order if units is None else None
    if facts.queue is not None:
        order = facts.queue.chunk_order
    merged = SettingsRequest(
        target_round=request.target_round,
        assignments_per_round=source.assignments_per_round,
        seed=source.seed if facts.seed is None else facts.seed,
        batch_size=source.batch_size,
        learning_rate=source.learning_rate,
        local_epochs=source.local_epochs,
        hyperparameters=tuple((dict(source.hyperparameters) | dict(given.hyperparameters)).items()),
        chunk_order=order,
        min_participants=source.min_participants,
        validation_interval=source.validation_interval,
        silence_timeout=source.silence_timeout,
        assignment_timeout=source.assignment_timeout,
        units_per_assignment=units,
        strategy=source.aggregation.strategy,
    )
    if (given.strategy or source.aggregation.strategy) == source.aggregation.strategy:
        kept = {f.name: getattr(source.aggregation, f.name) for f in fields(Aggregation)}
        merged = replace(merged, **kept)
    changed = {
        f.name: getattr(given, f.name)
        for f in fields(SettingsRequest)
        if f.name not in ("epochs", "target_round", "hyperparameters") and getattr(given, f.name) is not None
    }
    return replace(merged, **changed)


def _origin(request: Continuation, spec: JobSpec, facts: CheckpointFacts) -> Origin:
    """Returns where the work begins; worth something only when nothing else is wrong."""
    if facts.queue is not None and not request.new_queue:
        return Origin(facts.round, facts.queue.pass_number, facts.queue.next_index)
    if facts.sequence is not None and not request.new_queue:
        seed, unit = facts.sequence
        return Origin(facts.round, sequence_seed=seed, next_unit=unit)
    if spec.package.experience:
        return Origin(facts.round, sequence_seed=sequence_seed(spec.settings.seed, facts.round))
    return Origin(facts.round)


def _target(request: Continuation, facts: CheckpointFacts) -> list[Violation]:
    wrong = []
    if request.target_round <= facts.round:
        wrong.append(
            Violation(
                "target_round",
                f"expected a round above the checkpoint's, which is {facts.round}; "
                f"found {request.target_round}",
            )
        )
    if request.round is not None and request.round != facts.round:
        wrong.append(
            Violation("round", f"expected {facts.round}, the checkpoint's round; found {request.round}")
        )
    if request.settings.epochs is not None:
        wrong.append(Violation("settings.epochs", "expected nothing: target_round says how far the job goes"))
    also = request.settings.target_round
    if also is not None and also != request.target_round:
        wrong.append(
            Violation("settings.target_round", f"expected nothing or {request.target_round}, found {also}")
        )
    return wrong


def _auxiliary(package: PackageSpec, facts: CheckpointFacts) -> list[Violation]:
    """Compares the auxiliary weights with those of the checkpoint; version 1 doesn't say."""
    if facts.format_version == 1:
        return []
    now = {named.name: named.file.sha256 for named in package.auxiliary_weights}
    wrong = []
    for name in sorted(now.keys() | facts.auxiliary_weights.keys()):
        trained, found = facts.auxiliary_weights.get(name), now.get(name)
        if trained != found:
            wrong.append(
                Violation(
                    f"package.auxiliary_weights[{name!r}]",
                    f"the checkpoint was trained with {trained or 'no such file'}, "
                    f"the package has {found or 'none'}",
                )
            )
    return wrong


def _data(request: Continuation, source: JobSpec, spec: JobSpec, facts: CheckpointFacts) -> list[Violation]:
    """Says how the dataset isn't the checkpoint's, where its queue is to go on."""
    if request.new_queue or spec.package.experience or facts.queue is None:
        return []
    wrong = _differences(source.chunks, spec.chunks)
    found = manifest_sha256(spec.chunks)
    if not wrong and found != facts.queue.manifest_sha256:
        wrong.append(
            Violation(
                "dataset",
                f"the checkpoint was trained on the dataset {facts.queue.manifest_sha256} (SHA-256 over its "
                f"chunks' digests), this one is {found}",
            )
        )
    if not wrong and facts.queue.next_index >= len(spec.chunks):
        wrong.append(
            Violation(
                "checkpoint",
                f"its queue stands at chunk {facts.queue.next_index} of {len(spec.chunks)}: it is damaged",
            )
        )
    return wrong


def _differences(before: Sequence[Chunk], after: Sequence[Chunk]) -> list[Violation]:
    """Names every difference between two manifests, up to a bound."""
    wrong = []
    if len(before) != len(after):
        wrong.append(
            Violation(
                "dataset.chunks",
                f"the source job has {len(before)} chunks, this dataset {len(after)}; "
                "a new dataset needs new_queue",
            )
        )
    for i, (old, new) in enumerate(zip(before, after, strict=False)):
        wrong += [
            Violation(
                f"dataset.chunks[{i}].{f.name}",
                f"{old.id!r}: the source job has {getattr(old, f.name)}, this dataset "
                f"{getattr(new, f.name)}; a new dataset needs new_queue",
            )
            for f in fields(Chunk)
            if getattr(old, f.name) != getattr(new, f.name)
        ]
    if len(wrong) <= _MOST_DIFFERENCES:
        return wrong
    more = Violation("dataset.chunks", f"and {len(wrong) - _MOST_DIFFERENCES} more differences")
    return [*wrong[:_MOST_DIFFERENCES], more]


def _queue(request: Continuation, spec: JobSpec, facts: CheckpointFacts) -> list[Violation]:
    """Says why the checkpoint's queue or sequence can't go on."""
    if request.new_queue:
        return []
    if facts.queue is None and facts.sequence is None:
        return [
            Violation(
                "new_queue",
                f"expected true: a checkpoint of version {facts.format_version} doesn't say where its queue "
                "stands; found false",
            )
        ]
    if (facts.sequence is not None) != spec.package.experience:
        return [Violation("checkpoint", "its queue is of another kind of work than the package's")]
    wrong = []
    if facts.queue is not None:
        orders = (
            ("settings.seed", facts.seed, spec.settings.seed),
            ("settings.chunk_order", facts.queue.chunk_order, spec.settings.chunk_order),
        )
        wrong = [
            Violation(
                field, f"expected {old}, which orders the queue that goes on, or new_queue; found {new}"
            )
            for field, old, new in orders
            if old != new
        ]
    return wrong


def _optimizer(facts: CheckpointFacts) -> list[Violation]:
    """Says which tensors of its own strategy a checkpoint lacks."""
    if facts.strategy is None:
        return []
    needed = optimizer_names(Aggregation.resolve(Strategy(facts.strategy)))
    return [
        Violation("checkpoint", f"it was made with {facts.strategy}, but has no {name}")
        for name in needed
        if name not in facts.optimizer
    ]
