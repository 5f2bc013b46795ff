"""Package, data and settings, from messages and back."""

from google.protobuf import duration_pb2

from covey.v1 import common_pb2, coordinator_service_pb2, dataset_pb2, job_pb2, package_pb2
from covey_coordinator.domain.aggregation import Aggregation, Strategy
from covey_coordinator.domain.spec import (
    Chunk,
    ChunkOrder,
    FileSpec,
    HyperparameterSpec,
    JobSpec,
    NamedFileSpec,
    Origin,
    PackageSpec,
    ParameterSpec,
    Settings,
    SettingsRequest,
    UploadedFile,
)

__all__ = [
    "aggregation_to_proto",
    "chunk_from_proto",
    "chunk_to_proto",
    "duration_to_proto",
    "package_from_proto",
    "package_to_proto",
    "settings_from_proto",
    "settings_request_from_proto",
    "settings_to_proto",
    "spec_from_bytes",
    "uploads_from_proto",
]


def duration_to_proto(seconds: float) -> duration_pb2.Duration:
    """Returns seconds as a Duration, to the nanosecond."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def _seconds(message: duration_pb2.Duration) -> float:
    return message.ToNanoseconds() / 1e9


def _file(message: package_pb2.PackageFile | package_pb2.NamedFile) -> FileSpec:
    return FileSpec(message.file_name, message.bytes, message.sha256)


def _optional(message: package_pb2.ModelPackage, field: str) -> FileSpec | None:
    return _file(getattr(message, field)) if message.HasField(field) else None  # type: ignore[arg-type]  # by name


def package_from_proto(message: package_pb2.ModelPackage) -> PackageSpec:
    """Returns what the coordinator needs of a manifest; the manifest itself is kept beside it as it is."""
    work = message.work_source
    return PackageSpec(
        name=message.name,
        version=message.version,
        description=message.description,
        unit=work.unit,
        experience=work.kind == package_pb2.WorkSource.EXPERIENCE,
        inputs=work.inputs,
        module=_file(message.module),
        parameters=tuple(ParameterSpec(p.name, tuple(p.shape)) for p in message.parameters),
        data_formats=tuple(message.data_formats),
        training=message.capabilities.training,
        evaluation=message.capabilities.evaluation,
        inference=message.capabilities.inference,
        describes_inference=message.HasField("inference"),
        min_units=work.min_units if work.HasField("min_units") else None,
        max_units=work.max_units if work.HasField("max_units") else None,
        metrics=tuple(metric.name for metric in message.metrics),
        hyperparameters=tuple(
            HyperparameterSpec(h.name, h.default, h.min, h.max) for h in message.hyperparameters
        ),
        gpu=any(backend.kind == common_pb2.GPU_WGPU for backend in message.backends),
        shader_archive=_optional(message, "shader_archive"),
        validation=_optional(message, "validation"),
        auxiliary_weights=tuple(NamedFileSpec(n.name, _file(n)) for n in message.auxiliary_weights),
        auxiliary_files=tuple(NamedFileSpec(n.name, _file(n)) for n in message.auxiliary_files),
        validation_examples=message.validation_example_count
        if message.HasField("validation_example_count")
        else None,
        manifest=message.SerializeToString(deterministic=True),
        evaluation_units=work.evaluation_units if work.HasField("evaluation_units") else None,
    )


def package_to_proto(package: PackageSpec) -> package_pb2.ModelPackage:
    """Returns the manifest as it came."""
    return package_pb2.ModelPackage.FromString(package.manifest)


def chunk_from_proto(message: dataset_pb2.Chunk) -> Chunk:
    """Returns a chunk."""
    return Chunk(
        message.id, message.file_name, message.bytes, message.sha256, message.format, message.example_count
    )


def chunk_to_proto(chunk: Chunk) -> dataset_pb2.Chunk:
    """Returns a chunk as the manifest has it."""
    return dataset_pb2.Chunk(
        id=chunk.id,
        file_name=chunk.file_name,
        bytes=chunk.size,
        sha256=chunk.sha256,
        format=chunk.format,
        example_count=chunk.examples,
    )


def uploads_from_proto(
    request: coordinator_service_pb2.CreateJobRequest | coordinator_service_pb2.ContinueJobRequest,
) -> tuple[UploadedFile, ...]:
    """Returns the files of a request as they were uploaded."""
    return tuple(UploadedFile(f.file_name, f.blob.size_bytes, f.blob.sha256) for f in request.files)


def _strategy(value: int) -> str | None:
    name = job_pb2.AggregationStrategy.Name(value).removeprefix("AGGREGATION_STRATEGY_")  # type: ignore[arg-type]  # an enum's number
    return None if name == "UNSPECIFIED" else name


def _order(message: job_pb2.JobSettings) -> ChunkOrder | None:
    name = job_pb2.ChunkOrder.Name(message.chunk_order).removeprefix("CHUNK_ORDER_")
    return None if name == "UNSPECIFIED" else ChunkOrder(name)


def settings_request_from_proto(message: job_pb2.JobSettings) -> SettingsRequest:
    """Returns settings as the owner gave them."""

    def given(field: str) -> object:
        return getattr(message, field) if message.HasField(field) else None  # type: ignore[arg-type]  # by name

    def setting(field: str) -> object:
        aggregation = message.aggregation
        return getattr(aggregation, field) if aggregation.HasField(field) else None  # type: ignore[arg-type]  # by name

    optional = (
        "epochs",
        "target_round",
        "assignments_per_round",
        "seed",
        "batch_size",
        "learning_rate",
        "local_epochs",
        "min_participants",
        "validation_interval",
    )
    aggregation = ("server_learning_rate", "momentum", "beta1", "beta2", "tau")
    values = {field: given(field) for field in optional} | {field: setting(field) for field in aggregation}
    return SettingsRequest(
        hyperparameters=tuple(sorted(message.hyperparameters.items())),
        chunk_order=_order(message),
        strategy=_strategy(message.aggregation.strategy),
        silence_timeout=_seconds(message.silence_timeout) if message.HasField("silence_timeout") else None,
        assignment_timeout=_seconds(message.assignment_timeout)
        if message.HasField("assignment_timeout")
        else None,
        experience=message.HasField("experience"),
        units_per_assignment=message.experience.units_per_assignment or None,
        **values,  # type: ignore[arg-type]  # each is its field's type or None
    )


def aggregation_to_proto(aggregation: Aggregation) -> job_pb2.AggregationSettings:
    """Returns the strategy with every setting in force."""
    return job_pb2.AggregationSettings(
        strategy=job_pb2.AggregationStrategy.Value(f"AGGREGATION_STRATEGY_{aggregation.strategy}"),
        server_learning_rate=aggregation.server_learning_rate,
        momentum=aggregation.momentum,
        beta1=aggregation.beta1,
        beta2=aggregation.beta2,
        tau=aggregation.tau,
    )


def settings_to_proto(settings: Settings) -> job_pb2.JobSettings:
    """Returns settings in force, all that mean something to the job filled in."""
    units = settings.units_per_assignment
    order = settings.chunk_order.value if units is None else "UNSPECIFIED"
    return job_pb2.JobSettings(
        epochs=settings.epochs,
        target_round=settings.target_round,
        assignments_per_round=settings.assignments_per_round,
        seed=settings.seed,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        local_epochs=settings.local_epochs,
        hyperparameters=dict(settings.hyperparameters),
        chunk_order=job_pb2.ChunkOrder.Value(f"CHUNK_ORDER_{order}"),
        aggregation=aggregation_to_proto(settings.aggregation),
        min_participants=settings.min_participants,
        validation_interval=settings.validation_interval,
        silence_timeout=duration_to_proto(settings.silence_timeout),
        assignment_timeout=duration_to_proto(settings.assignment_timeout),
        experience=job_pb2.ExperienceSettings(units_per_assignment=units) if units is not None else None,
    )


def settings_from_proto(message: job_pb2.JobSettings) -> Settings:
    """Returns settings in force, as `settings_to_proto` wrote them; hyperparameters by name."""
    aggregation = message.aggregation
    names = ("server_learning_rate", "momentum", "beta1", "beta2", "tau")
    given = {
        name: getattr(aggregation, name)
        for name in names
        if aggregation.HasField(name)  # type: ignore[arg-type]  # by name
    }
    return Settings(
        epochs=message.epochs if message.HasField("epochs") else None,
        target_round=message.target_round if message.HasField("target_round") else None,
        assignments_per_round=message.assignments_per_round,
        seed=message.seed,
        batch_size=message.batch_size,
        learning_rate=message.learning_rate,
        local_epochs=message.local_epochs,
        hyperparameters=tuple(sorted(message.hyperparameters.items())),
        chunk_order=_order(message) or ChunkOrder.SEEDED,
        aggregation=Aggregation.resolve(Strategy(_strategy(aggregation.strategy) or "FED_AVG"), **given),
        min_participants=message.min_participants,
        validation_interval=message.validation_interval,
        silence_timeout=_seconds(message.silence_timeout),
        assignment_timeout=_seconds(message.assignment_timeout),
        units_per_assignment=message.experience.units_per_assignment or None,
    )


def spec_from_bytes(package: bytes, dataset: bytes, settings: Settings, origin: Origin) -> JobSpec:
    """Returns a job's spec from its stored messages. Takes microseconds a chunk; call it in a thread."""
    chunks = dataset_pb2.DatasetManifest.FromString(dataset).chunks
    return JobSpec(
        package_from_proto(package_pb2.ModelPackage.FromString(package)),
        tuple(chunk_from_proto(chunk) for chunk in chunks),
        settings,
        origin,
    )
