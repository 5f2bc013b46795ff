"""What a checkpoint's header says, and whether the tensors of its file agree with it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from google.protobuf import json_format

from covey.v1 import checkpoint_pb2, storage_service_pb2
from covey_kit.checkpoints.container import Container, ContainerError, Tensor, load_json
from covey_kit.checkpoints.problems import Kind, problem
from covey_kit.validation import violations

__all__ = [
    "HEADER_KEY",
    "VERSIONS",
    "Layout",
    "check_expectation",
    "check_tensors",
    "header_problems",
    "read_header",
]

HEADER_KEY = "covey"
"""Under this key of `__metadata__` stands the header."""

VERSIONS = (1, 2)
"""Format versions that this program reads."""

_LAST_FIELD_OF_V1 = 9

Problems: TypeAlias = list[checkpoint_pb2.CheckpointProblem]


@dataclass(frozen=True)
class Layout:
    """Where the parts of a checkpoint lie in its file.

    Attributes:
        weights: the weights, as one range: None when they aren't one or aren't all there.
        optimizer: the optimizer's tensors that are there, in the header's order.
    """

    weights: tuple[int, int] | None
    optimizer: tuple[Tensor, ...]


def read_header(container: Container) -> checkpoint_pb2.CheckpointHeader:
    """Parses the header and checks its fields. Raises ContainerError (HEADER or UNKNOWN_VERSION)."""
    text = container.metadata.get(HEADER_KEY)
    if text is None:
        raise ContainerError(
            Kind.KIND_HEADER, f"`__metadata__` has no key `{HEADER_KEY}`: not a Covey checkpoint"
        )
    try:
        value = load_json(text)
    except ValueError as error:
        raise ContainerError(
            Kind.KIND_HEADER, f"`{HEADER_KEY}` isn't JSON that can be read: {error}"
        ) from None
    if not isinstance(value, dict):
        raise ContainerError(
            Kind.KIND_HEADER, f"`{HEADER_KEY}` is a JSON {type(value).__name__}, not an object"
        )
    version = value.get("formatVersion", value.get("format_version"))
    if isinstance(version, int) and not isinstance(version, bool) and version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise ContainerError(
            Kind.KIND_UNKNOWN_VERSION,
            f"format version {version}; this program knows {known}: use a newer one",
        )
    header = checkpoint_pb2.CheckpointHeader()
    try:
        json_format.ParseDict(value, header)
    except (json_format.ParseError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ContainerError(Kind.KIND_HEADER, f"`{HEADER_KEY}` isn't a checkpoint header: {error}") from None
    wrong = header_problems(header)
    if wrong:
        raise ContainerError(Kind.KIND_HEADER, f"`{HEADER_KEY}`: " + "; ".join(wrong[:8]))
    return header


def header_problems(header: checkpoint_pb2.CheckpointHeader) -> list[str]:
    """Returns everything that breaks the contract in the fields of a header, as sentences."""
    problems = [f"{violation.field} {violation.description}" for violation in violations(header)]
    if header.format_version == 1:
        late = [field.json_name for field, _ in header.ListFields() if field.number > _LAST_FIELD_OF_V1]
        if late:
            problems.append(f"version 1 has no {', '.join(late)}")
    return problems


def check_tensors(header: checkpoint_pb2.CheckpointHeader, container: Container) -> tuple[Layout, Problems]:
    """Compares the tensors of the file with the header. Reads no tensor's bytes."""
    problems: Problems = []
    names = list(header.parameter_names)
    optimizer = [tensor.name for tensor in header.optimizer]
    wanted = set(names) | set(optimizer)
    if len(wanted) != len(names) + len(optimizer):
        problems.append(problem(Kind.KIND_TENSORS, "the header names a tensor twice"))
    for name in wanted - set(container.tensors):
        problems.append(problem(Kind.KIND_TENSORS, "named by the header, but not in the file", name))
    for name in container.tensors:
        if name not in wanted:
            problems.append(problem(Kind.KIND_TENSORS, "in the file, but not named by the header", name))
        elif container.tensors[name].dtype != "F32":
            found = container.tensors[name].dtype
            problems.append(problem(Kind.KIND_TENSORS, f"has dtype {found}; expected F32", name))
    problems.sort(key=lambda p: p.tensor)

    weights = _weights_range(names, container, problems)
    count = sum(container.tensors[name].elements for name in names if name in container.tensors)
    if count != header.weight_count:
        problems.append(
            problem(
                Kind.KIND_WEIGHTS_SIZE, f"the file has {count} weights; its header says {header.weight_count}"
            )
        )
    states = tuple(container.tensors[name] for name in optimizer if name in container.tensors)
    for tensor in states:
        if tensor.elements != header.weight_count:
            problems.append(
                problem(
                    Kind.KIND_OPTIMIZER_SIZE,
                    f"has {tensor.elements} elements; expected one for each of {header.weight_count} weights",
                    tensor.name,
                )
            )
    return Layout(weights, tuple(t for t in states if t.dtype == "F32")), problems


def _weights_range(names: list[str], container: Container, problems: Problems) -> tuple[int, int] | None:
    """Returns the first byte of the weights (from the end of the header) and the byte behind the last."""
    end = 0
    for name in names:
        tensor = container.tensors.get(name)
        if tensor is None or tensor.dtype != "F32":
            return None
        if tensor.begin != end:
            problems.append(
                problem(
                    Kind.KIND_TENSORS,
                    f"begins at byte {tensor.begin} of the data; in the header's order it would at {end}",
                    name,
                )
            )
            return None
        end = tensor.end
    return (0, end) if names else None


def check_expectation(
    header: checkpoint_pb2.CheckpointHeader,
    container: Container,
    expectation: storage_service_pb2.CheckpointExpectation,
) -> Problems:
    """Compares a header and its tensors with what a job or a package expects."""
    problems = list(_check_parameters(header, container, expectation)) if expectation.parameters else []
    for what, expected, found in (
        ("package name", expectation.package_name, header.package_name),
        ("package version", expectation.package_version, header.package_version),
        ("module SHA-256", expectation.module_sha256, header.module_sha256),
    ):
        if expected and expected != found:
            problems.append(problem(Kind.KIND_PACKAGE, f"the {what} is {found!r}; expected {expected!r}"))
    if expectation.HasField("round") and expectation.round != header.round:
        problems.append(
            problem(Kind.KIND_ROUND, f"it's the result of round {header.round}; expected {expectation.round}")
        )
    return problems


def _check_parameters(
    header: checkpoint_pb2.CheckpointHeader,
    container: Container,
    expectation: storage_service_pb2.CheckpointExpectation,
) -> Iterator[checkpoint_pb2.CheckpointProblem]:
    expected = [parameter.name for parameter in expectation.parameters]
    found = list(header.parameter_names)
    for name in sorted(set(expected) - set(found)):
        yield problem(Kind.KIND_TENSORS, "in the manifest, but not in the checkpoint", name)
    for name in sorted(set(found) - set(expected)):
        yield problem(Kind.KIND_TENSORS, "in the checkpoint, but not in the manifest", name)
    if set(expected) == set(found) and expected != found:
        yield problem(Kind.KIND_TENSORS, "the tensors aren't in the manifest's order")
    for parameter in expectation.parameters:
        tensor = container.tensors.get(parameter.name)
        if tensor is not None and tensor.shape != tuple(parameter.shape):
            yield problem(
                Kind.KIND_SHAPE,
                f"has the shape {list(tensor.shape)}; expected {list(parameter.shape)}",
                parameter.name,
            )
    weights = sum(math.prod(parameter.shape) for parameter in expectation.parameters)
    if weights != header.weight_count:
        yield problem(
            Kind.KIND_WEIGHTS_SIZE,
            f"the header says {header.weight_count} weights; the manifest has {weights}",
        )
