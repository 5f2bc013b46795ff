"""What a checkpoint says of itself: a pure function of package, data, settings and the round's results."""

from covey.v1 import checkpoint_pb2, common_pb2, job_pb2, storage_service_pb2
from covey_coordinator.convert.spec import aggregation_to_proto, package_to_proto
from covey_coordinator.convert.values import backend_to_proto, metrics_from_proto, metrics_to_proto
from covey_coordinator.domain.plan import next_unit, position_after
from covey_coordinator.domain.ports import CheckpointFacts, CheckpointFile, QueuePosition, RoundSummary
from covey_coordinator.domain.spec import ChunkOrder, JobSpec, PackageSpec, manifest_sha256
from covey_kit.errors import Violation

__all__ = [
    "expectation_to_proto",
    "facts_from_proto",
    "file_to_proto",
    "header_to_proto",
    "package_expectation_to_proto",
    "problems_from_proto",
]


def header_to_proto(spec: JobSpec, summary: RoundSummary) -> checkpoint_pb2.CheckpointHeader:
    """Returns the header of a round's checkpoint, without the digests that its writer fills in.

    What isn't here must not be: no job id, time, participant, nor anything of the settings that says how
    far the training goes. The same training gives the same bytes.
    """
    return checkpoint_pb2.CheckpointHeader(
        format_version=2,
        package_name=spec.package.name,
        package_version=spec.package.version,
        module_sha256=spec.package.module.sha256,
        round=summary.round,
        weight_count=spec.package.weight_count,
        metrics=metrics_to_proto(summary.metrics),
        units=summary.units,
        aggregation=aggregation_to_proto(spec.settings.aggregation),
        position=_position(spec, summary.round),
        seed=spec.settings.seed,
        auxiliary_weights=[
            checkpoint_pb2.AuxiliaryDigest(name=n.name, sha256=n.file.sha256)
            for n in spec.package.auxiliary_weights
        ],
        backends=sorted(backend_to_proto(backend) for backend in summary.backends),
    )


def _position(spec: JobSpec, round_number: int) -> checkpoint_pb2.WorkPosition:
    if spec.package.experience:
        return checkpoint_pb2.WorkPosition(
            experience=checkpoint_pb2.ExperiencePosition(
                sequence_seed=spec.origin.sequence_seed,
                next_unit=next_unit(spec.settings, round_number, spec.origin),
            )
        )
    position = position_after(spec.settings, round_number, len(spec.chunks), spec.origin)
    dataset = checkpoint_pb2.DatasetPosition(
        next_index=position.next_index,
        manifest_sha256=manifest_sha256(spec.chunks),
        chunk_order=job_pb2.ChunkOrder.Value(f"CHUNK_ORDER_{spec.settings.chunk_order}"),
        assignments_per_round=spec.settings.assignments_per_round,
    )
    setattr(dataset, "pass", position.pass_number)  # the field's name is a word of Python
    return checkpoint_pb2.WorkPosition(dataset=dataset)


def package_expectation_to_proto(package: PackageSpec) -> storage_service_pb2.CheckpointExpectation:
    """Returns what a checkpoint of the package must fit."""
    return storage_service_pb2.CheckpointExpectation(
        parameters=package_to_proto(package).parameters,
        package_name=package.name,
        package_version=package.version,
        module_sha256=package.module.sha256,
    )


def expectation_to_proto(spec: JobSpec, round_number: int) -> storage_service_pb2.CheckpointExpectation:
    """Returns what the checkpoint of a job's round must fit."""
    expectation = package_expectation_to_proto(spec.package)
    expectation.round = round_number
    return expectation


def _queue(position: checkpoint_pb2.DatasetPosition) -> QueuePosition:
    order = job_pb2.ChunkOrder.Name(position.chunk_order).removeprefix("CHUNK_ORDER_")
    return QueuePosition(
        pass_number=getattr(position, "pass"),  # the field's name is a word of Python
        next_index=position.next_index,
        manifest_sha256=position.manifest_sha256,
        chunk_order=ChunkOrder.SEEDED if order == "UNSPECIFIED" else ChunkOrder(order),
    )


def facts_from_proto(header: checkpoint_pb2.CheckpointHeader) -> CheckpointFacts:
    """Returns what a checkpoint says of itself, as far as going on from it needs it."""
    position = header.position
    strategy = None
    if header.HasField("aggregation"):
        name = job_pb2.AggregationStrategy.Name(header.aggregation.strategy)
        strategy = name.removeprefix("AGGREGATION_STRATEGY_").replace("UNSPECIFIED", "FED_AVG")
    sequence = None
    if position.HasField("experience"):
        sequence = (position.experience.sequence_seed, position.experience.next_unit)
    return CheckpointFacts(
        format_version=header.format_version,
        round=header.round,
        metrics=metrics_from_proto(header.metrics),
        units=header.units,
        seed=header.seed if header.format_version > 1 else None,
        strategy=strategy,
        optimizer=tuple(tensor.name for tensor in header.optimizer),
        queue=_queue(position.dataset) if position.HasField("dataset") else None,
        sequence=sequence,
        auxiliary_weights={digest.name: digest.sha256 for digest in header.auxiliary_weights},
    )


def problems_from_proto(found: storage_service_pb2.VerifyCheckpointResponse) -> list[Violation]:
    """Returns everything that is wrong with a checkpoint file."""
    wrong = []
    for problem in found.problems:
        kind = checkpoint_pb2.CheckpointProblem.Kind.Name(problem.kind).removeprefix("KIND_").lower()
        tensor = f"[{problem.tensor}]" if problem.tensor else ""
        wrong.append(Violation(f"checkpoint.{kind}{tensor}", problem.message))
    return wrong


def file_to_proto(file: CheckpointFile) -> common_pb2.BlobRef:
    """Returns a checkpoint file's key in storage."""
    return common_pb2.BlobRef(sha256=file.sha256, size_bytes=file.size)
