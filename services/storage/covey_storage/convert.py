"""Contract and domain, in named pairs. The only module that knows both."""

from collections.abc import Iterable

from google.protobuf import timestamp_pb2

from covey.v1 import checkpoint_pb2, common_pb2, package_pb2, storage_service_pb2
from covey_kit.checkpoints import Examination
from covey_storage.domain.catalog import Inventory
from covey_storage.domain.model import (
    BlobRecord,
    BlobRef,
    CheckpointRecord,
    Examined,
    Expectation,
    Problem,
)
from covey_storage.domain.scrub import Progress

__all__ = [
    "checkpoint_to_proto",
    "examined_from_kit",
    "examined_to_proto",
    "expectation_from_proto",
    "expectation_to_proto",
    "inventory_to_proto",
    "progress_to_proto",
    "record_to_proto",
    "ref_from_proto",
    "ref_to_proto",
]

_Kind = checkpoint_pb2.CheckpointProblem.Kind


def ref_from_proto(ref: common_pb2.BlobRef) -> BlobRef:
    """Contract to domain."""
    return BlobRef(ref.sha256, ref.size_bytes)


def ref_to_proto(ref: BlobRef) -> common_pb2.BlobRef:
    """Domain to contract."""
    return common_pb2.BlobRef(sha256=ref.sha256, size_bytes=ref.size)


def record_to_proto(record: BlobRecord) -> storage_service_pb2.StoredBlob:
    """Domain to contract."""
    created = timestamp_pb2.Timestamp()
    created.FromMicroseconds(round(record.create_time * 1e6))
    return storage_service_pb2.StoredBlob(
        blob=ref_to_proto(record.ref),
        create_time=created,
        holders=record.holders,
        quarantined=record.quarantined,
    )


def inventory_to_proto(inventory: Inventory) -> storage_service_pb2.GetInventoryResponse:
    """Domain to contract, without the blobs: a long page is converted in slices."""
    totals = inventory.totals
    return storage_service_pb2.GetInventoryResponse(
        blob_count=totals.blob_count,
        blob_bytes=totals.blob_bytes,
        unreferenced_count=totals.unreferenced_count,
        unreferenced_bytes=totals.unreferenced_bytes,
        quarantined_count=totals.quarantined_count,
        partial_count=inventory.partial_count,
        checkpoint_count=totals.checkpoint_count,
        next_page_token=inventory.next_page_token,
    )


def progress_to_proto(progress: Progress) -> storage_service_pb2.ScrubResponse:
    """Domain to contract."""
    return storage_service_pb2.ScrubResponse(
        blobs_checked=progress.blobs_checked,
        bytes_checked=progress.bytes_checked,
        blobs_total=progress.blobs_total,
        damaged=progress.damaged,
        orphans_removed=progress.orphans_removed,
        done=progress.done,
    )


def checkpoint_to_proto(record: CheckpointRecord) -> checkpoint_pb2.Checkpoint:
    """Domain to contract."""
    blob = ref_to_proto(record.blob)
    return checkpoint_pb2.Checkpoint(
        job_id=record.job_id,
        round=record.round,
        blob=blob,
        header=checkpoint_pb2.CheckpointHeader.FromString(record.header),
        weights=common_pb2.WeightsRef(
            blob=blob,
            offset=record.weights_offset,
            size_bytes=record.weights_bytes,
            sha256=record.weights_sha256,
        ),
    )


def expectation_from_proto(expectation: storage_service_pb2.CheckpointExpectation) -> Expectation:
    """Contract to domain."""
    return Expectation(
        {parameter.name: tuple(parameter.shape) for parameter in expectation.parameters},
        expectation.package_name,
        expectation.package_version,
        expectation.module_sha256,
        expectation.round if expectation.HasField("round") else None,
    )


def expectation_to_proto(expectation: Expectation) -> storage_service_pb2.CheckpointExpectation:
    """Domain to contract."""
    return storage_service_pb2.CheckpointExpectation(
        parameters=(
            package_pb2.Parameter(name=name, shape=shape) for name, shape in expectation.parameters.items()
        ),
        package_name=expectation.package_name,
        package_version=expectation.package_version,
        module_sha256=expectation.module_sha256,
        round=expectation.round,
    )


def _problems(problems: Iterable[checkpoint_pb2.CheckpointProblem]) -> tuple[Problem, ...]:
    return tuple(Problem(_Kind.Name(p.kind).removeprefix("KIND_"), p.message, p.tensor) for p in problems)


def examined_from_kit(examination: Examination) -> Examined:
    """What the kit's codec found, to domain."""
    header = examination.header
    problems = _problems(examination.problems)
    if header is None:
        return Examined(problems)
    return Examined(
        problems,
        header.SerializeToString(deterministic=True),
        header.round,
        examination.weights_offset,
        examination.weights_bytes,
        header.weights_sha256,
    )


def examined_to_proto(examined: Examined) -> storage_service_pb2.VerifyCheckpointResponse:
    """Domain to contract."""
    response = storage_service_pb2.VerifyCheckpointResponse(valid=not examined.problems)
    for problem in examined.problems:
        response.problems.add(
            kind=_Kind.Value(f"KIND_{problem.kind}"), message=problem.message, tensor=problem.tensor
        )
    if examined.header is not None:
        response.header.ParseFromString(examined.header)
    return response
