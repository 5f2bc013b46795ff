"""What a checkpoint says of itself: a pure function of package, data, settings and the round's results."""

import hashlib

from covey.v1 import checkpoint_pb2, common_pb2, job_pb2, storage_service_pb2
from covey_coordinator.convert.spec import aggregation_to_proto, package_to_proto
from covey_coordinator.convert.values import backend_to_proto, metrics_to_proto
from covey_coordinator.domain.plan import position_after
from covey_coordinator.domain.ports import CheckpointFile, RoundSummary
from covey_coordinator.domain.spec import JobSpec

__all__ = ["expectation_to_proto", "file_to_proto", "header_to_proto", "manifest_sha256"]


def manifest_sha256(spec: JobSpec) -> str:
    """Returns which dataset it is: SHA-256 over the chunks' raw digests (32 bytes), in manifest order."""
    digest = hashlib.sha256()
    for chunk in spec.chunks:
        digest.update(bytes.fromhex(chunk.sha256))
    return digest.hexdigest()


def header_to_proto(spec: JobSpec, summary: RoundSummary) -> checkpoint_pb2.CheckpointHeader:
    """Returns the header of a round's checkpoint, without the digests that its writer fills in.

    What isn't here must not be: no job id, time, participant, nor anything of the settings that says how
    far the training goes. The same training gives the same bytes.
    """
    position = position_after(spec.settings, summary.round, len(spec.chunks))
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
        position=_position(spec, position.pass_number, position.next_index),
        seed=spec.settings.seed,
        auxiliary_weights=[
            checkpoint_pb2.AuxiliaryDigest(name=n.name, sha256=n.file.sha256)
            for n in spec.package.auxiliary_weights
        ],
        backends=sorted(backend_to_proto(backend) for backend in summary.backends),
    )


def _position(spec: JobSpec, pass_number: int, next_index: int) -> checkpoint_pb2.WorkPosition:
    dataset = checkpoint_pb2.DatasetPosition(
        next_index=next_index,
        manifest_sha256=manifest_sha256(spec),
        chunk_order=job_pb2.ChunkOrder.Value(f"CHUNK_ORDER_{spec.settings.chunk_order}"),
        assignments_per_round=spec.settings.assignments_per_round,
    )
    setattr(dataset, "pass", pass_number)  # the field's name is a word of Python
    return checkpoint_pb2.WorkPosition(dataset=dataset)


def expectation_to_proto(spec: JobSpec, round_number: int) -> storage_service_pb2.CheckpointExpectation:
    """Returns what a checkpoint of the job must fit."""
    return storage_service_pb2.CheckpointExpectation(
        parameters=package_to_proto(spec.package).parameters,
        package_name=spec.package.name,
        package_version=spec.package.version,
        module_sha256=spec.package.module.sha256,
        round=round_number,
    )


def file_to_proto(file: CheckpointFile) -> common_pb2.BlobRef:
    """Returns a checkpoint file's key in storage."""
    return common_pb2.BlobRef(sha256=file.sha256, size_bytes=file.size)
