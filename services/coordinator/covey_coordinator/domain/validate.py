"""Is this a job? Everything that is wrong with it, at once."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from covey_coordinator.domain.plan import next_unit, rounds_wanted, sequence_seed
from covey_coordinator.domain.settings import MAX_UNITS, resolve_settings
from covey_coordinator.domain.spec import (
    Chunk,
    FileSpec,
    JobSpec,
    Origin,
    PackageSpec,
    Settings,
    SettingsRequest,
    UploadedFile,
)
from covey_kit.errors import InvalidArgument, Reason, Violation

__all__ = ["MAX_ROUNDS", "MAX_WEIGHTS", "check_job", "check_sequence", "raise_all", "validate_job"]

MAX_WEIGHTS = 1 << 30
"""Most weights of a model: 4 GiB of f32, all that a 32-bit module can address."""

MAX_ROUNDS = 10_000_000
"""Most rounds of a job; the bound of `target_round` in the contract."""

_MAX_UNIT = (1 << 63) - 1
"""Greatest number of a unit: modules number them in 64 bits, signed."""

_Uploads = Mapping[str, Sequence[UploadedFile]]


def _repeated(names: Iterable[str]) -> list[str]:
    return sorted(name for name, times in Counter(names).items() if times > 1)


def _check_file(field: str, declared: FileSpec, uploads: _Uploads) -> list[Violation]:
    """Compares a declared file with what was uploaded under its name."""
    found = uploads.get(declared.file_name, ())
    if not found:
        others = ", ".join(sorted(uploads)[:10]) or "none"
        return [Violation(field, f"declared {declared.file_name!r}, found no such file (files: {others})")]
    if any(f.size == declared.size and f.sha256 == declared.sha256 for f in found):
        return []
    upload, wrong = found[0], []
    if upload.size != declared.size:
        wrong.append(
            Violation(
                f"{field}.bytes",
                f"{declared.file_name!r}: declared {declared.size} bytes, found {upload.size}",
            )
        )
    if upload.sha256 != declared.sha256:
        wrong.append(
            Violation(
                f"{field}.sha256",
                f"{declared.file_name!r}: declared {declared.sha256}, found {upload.sha256}",
            )
        )
    return wrong


def _package_shape(package: PackageSpec) -> list[Violation]:
    """What in a manifest contradicts itself, beyond the rules that stand on its fields."""
    wrong = [
        Violation("package", f"{name!r} is the file of more than one field")
        for name in _repeated(file.file_name for _, file in package.files())
    ]
    for field, named in (
        ("package.auxiliary_weights", package.auxiliary_weights),
        ("package.auxiliary_files", package.auxiliary_files),
    ):
        wrong += [Violation(field, f"{name!r} is there twice") for name in _repeated(n.name for n in named)]
    wrong += [
        Violation("package.parameters", f"{name!r} is there twice")
        for name in _repeated(parameter.name for parameter in package.parameters)
    ]
    if package.weight_count > MAX_WEIGHTS:
        wrong.append(
            Violation(
                "package.parameters", f"expected at most {MAX_WEIGHTS} weights, found {package.weight_count}"
            )
        )
    wrong += _experience_shape(package) if package.experience else _dataset_shape(package)
    if (
        package.min_units is not None
        and package.max_units is not None
        and package.min_units > package.max_units
    ):
        wrong.append(
            Violation(
                "package.work_source.min_units",
                f"expected at most max_units, which is {package.max_units}, found {package.min_units}",
            )
        )
    return wrong + _capabilities(package) + _defaults(package)


def _dataset_shape(package: PackageSpec) -> list[Violation]:
    if package.inputs == "dataset":
        return []
    return [Violation("package.work_source.inputs", "expected 'dataset' for kind DATASET, found 'none'")]


def _experience_shape(package: PackageSpec) -> list[Violation]:
    wrong = []
    if package.inputs != "none":
        wrong.append(
            Violation(
                "package.work_source.inputs",
                "expected 'none' for kind EXPERIENCE, because an assignment carries either chunks or units; "
                f"found {package.inputs!r}",
            )
        )
    if package.validation is not None:
        wrong.append(
            Violation(
                "package.validation",
                f"expected none, because the package makes its own {package.unit}s (kind EXPERIENCE): it is "
                f"evaluated on work_source.evaluation_units; found {package.validation.file_name!r}",
            )
        )
    if package.max_units == 0:
        wrong.append(Violation("package.work_source.max_units", "expected at least 1, found 0"))
    for name in ("min_units", "evaluation_units"):
        value = getattr(package, name)
        if value is not None and value > MAX_UNITS:
            wrong.append(
                Violation(f"package.work_source.{name}", f"expected at most {MAX_UNITS}, found {value}")
            )
    if package.evaluation_units and not package.evaluation:
        wrong.append(
            Violation(
                "package.capabilities.evaluation",
                f"expected true, because work_source.evaluation_units is {package.evaluation_units}; "
                "found false",
            )
        )
    return wrong


def _capabilities(package: PackageSpec) -> list[Violation]:
    wrong = []
    if not package.training:
        wrong.append(Violation("package.capabilities.training", "expected true: a job trains; found false"))
    if package.validation is not None and not package.evaluation and not package.experience:
        wrong.append(
            Violation(
                "package.capabilities.evaluation", "expected true, because validation is there; found false"
            )
        )
    if package.inference != package.describes_inference:
        has = "there" if package.describes_inference else "absent"
        wrong.append(
            Violation(
                "package.inference",
                f"capabilities.inference is {str(package.inference).lower()}, but inference is {has}",
            )
        )
    return wrong


def _defaults(package: PackageSpec) -> list[Violation]:
    wrong = []
    for i, spec in enumerate(package.hyperparameters):
        whole = spec.name in ("batchSize", "localEpochs")
        if whole and (spec.default < 1 or spec.default != int(spec.default)):
            wrong.append(
                Violation(
                    f"package.hyperparameters[{i}].default",
                    f"{spec.name}: expected a whole number from 1, found {spec.default:g}",
                )
            )
        if spec.name == "learningRate" and spec.default <= 0:
            wrong.append(
                Violation(
                    f"package.hyperparameters[{i}].default",
                    f"learningRate: expected a number above 0, found {spec.default:g}",
                )
            )
    return wrong


def _check_dataset(package: PackageSpec, chunks: Sequence[Chunk], uploads: _Uploads) -> list[Violation]:
    if package.experience:
        return _check_no_dataset(package, chunks)
    if not chunks:
        return [Violation("dataset.chunks", "expected at least one chunk, found none")]
    wrong = [
        Violation("dataset.chunks", f"the id {name!r} is there more than once")
        for name in _repeated(chunk.id for chunk in chunks)
    ]
    wrong += [
        Violation("dataset.chunks", f"the file name {name!r} is there more than once")
        for name in _repeated(chunk.file_name for chunk in chunks)
    ]
    formats = ", ".join(package.data_formats)
    for i, chunk in enumerate(chunks):
        field = f"dataset.chunks[{i}]"
        wrong += _check_file(field, FileSpec(chunk.file_name, chunk.size, chunk.sha256), uploads)
        if chunk.format not in package.data_formats:
            wrong.append(
                Violation(
                    f"{field}.format",
                    f"{chunk.id!r}: the package reads {formats}; found {chunk.format!r}",
                )
            )
        least, most = package.min_units or 0, package.max_units
        if chunk.examples < least or (most is not None and chunk.examples > most):
            bound = f"{least} to {most}" if most is not None else f"at least {least}"
            wrong.append(
                Violation(
                    f"{field}.example_count",
                    f"{chunk.id!r}: the package takes {bound} units an assignment, found {chunk.examples}",
                )
            )
    return wrong


def _check_no_dataset(package: PackageSpec, chunks: Sequence[Chunk]) -> list[Violation]:
    if not chunks:
        return []
    return [
        Violation(
            "dataset.chunks",
            f"expected no chunks, because the package makes its own {package.unit}s (kind EXPERIENCE); "
            f"found {len(chunks)}",
        )
    ]


def check_sequence(settings: Settings, origin: Origin, final_round: int) -> list[Violation]:
    """Checks that an experience job's units can be numbered to its end."""
    if settings.units_per_assignment is None:
        return []
    end = next_unit(settings, final_round, origin)
    if end <= _MAX_UNIT:
        return []
    return [
        Violation(
            "settings.experience.units_per_assignment",
            f"these settings number units up to {end}, expected at most {_MAX_UNIT}",
        )
    ]


def _check_rounds(settings: Settings, chunk_count: int) -> list[Violation]:
    wanted = rounds_wanted(settings, chunk_count)
    if wanted <= MAX_ROUNDS:
        return []
    return [
        Violation("settings.epochs", f"expected at most {MAX_ROUNDS} rounds, these settings make {wanted}")
    ]


def raise_all(groups: Sequence[tuple[Reason, Sequence[Violation]]]) -> None:
    """Raises InvalidArgument with all violations, if there are any, and the first such group's reason."""
    wrong = [violation for _, violations in groups for violation in violations]
    if not wrong:
        return
    reason = next(reason for reason, violations in groups if violations)
    listed = "; ".join(f"{v.field}: {v.description}" for v in wrong[:10])
    more = f"; and {len(wrong) - 10} more" if len(wrong) > 10 else ""
    raise InvalidArgument(reason, f"this can't be a job: {listed}{more}", violations=wrong)


Groups = list[tuple[Reason, Sequence[Violation]]]
"""Violations and the reason that each group of them gives an error."""


def check_job(
    package: PackageSpec,
    chunks: Sequence[Chunk],
    request: SettingsRequest,
    files: Sequence[UploadedFile],
) -> tuple[JobSpec, Groups]:
    """Checks a job that is to be and fills in the defaults of its settings.

    Takes microseconds a chunk; call it in a thread for many.

    Returns the job, worth something only when nothing is wrong, and everything that is wrong with it: with
    the package (PACKAGE_MISMATCH), the data (DATASET_MISMATCH), the settings (SETTINGS_MISMATCH).
    """
    uploads: dict[str, list[UploadedFile]] = defaultdict(list)
    for file in files:
        uploads[file.file_name].append(file)
    in_package = _package_shape(package)
    for field, declared in package.files():
        in_package += _check_file(field, declared, uploads)
    in_data = _check_dataset(package, chunks, uploads)
    settings, in_settings = resolve_settings(package, request)
    in_settings += _check_rounds(settings, len(chunks))
    origin = Origin(sequence_seed=sequence_seed(settings.seed, 0) if package.experience else 0)
    groups: Groups = [
        (Reason.PACKAGE_MISMATCH, in_package),
        (Reason.DATASET_MISMATCH, in_data),
        (Reason.SETTINGS_MISMATCH, in_settings),
    ]
    return JobSpec(package, tuple(chunks), settings, origin), groups


def validate_job(
    package: PackageSpec,
    chunks: Sequence[Chunk],
    request: SettingsRequest,
    files: Sequence[UploadedFile],
) -> JobSpec:
    """Returns a new job as `check_job` does.

    Raises:
        InvalidArgument: all violations, with the reason of the first group that has any.
    """
    spec, groups = check_job(package, chunks, request, files)
    final = rounds_wanted(spec.settings, len(chunks))
    groups.append((Reason.SETTINGS_MISMATCH, check_sequence(spec.settings, spec.origin, final)))
    raise_all(groups)
    return spec
