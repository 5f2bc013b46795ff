"""Predictions on this machine, from a package and a checkpoint."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from covey.packages import Package, run_inference
from covey.v1 import package_pb2
from covey_kit.checkpoints import CheckpointReader
from covey_kit.errors import InvalidArgument, Reason, Violation

__all__ = ["Prediction", "encode_input", "predict"]

_DTYPES: Mapping[int, str] = {
    package_pb2.TensorSpec.U8: "<u1",
    package_pb2.TensorSpec.I32: "<i4",
    package_pb2.TensorSpec.F32: "<f4",
}

PGM_HEADER_BYTES = 4096


@dataclass(frozen=True)
class Prediction:
    """What came out of one inference.

    Attributes:
        outputs: values by the name of the output tensor, flat and row-major.
        labels: names of the classes, when the first output is a score a class.
        round: the checkpoint's round.
    """

    outputs: Mapping[str, list[float]]
    labels: list[str]
    round: int

    def ranked(self) -> list[tuple[str, float]]:
        """Returns (label, score), the best first; empty without labels."""
        if not self.labels:
            return []
        first = next(iter(self.outputs.values()))
        return sorted(zip(self.labels, first, strict=True), key=lambda pair: -pair[1])

    @property
    def label(self) -> str | None:
        """The best class; None without labels."""
        ranked = self.ranked()
        return ranked[0][0] if ranked else None


def predict(package: Package, checkpoint: Path, source: Path) -> Prediction:
    """Runs one inference. Blocks: call it in a thread from a coroutine.

    Args:
        package: as `covey.packages.load` checked it.
        checkpoint: a checkpoint of this package.
        source: the input: `.npy`, `.pgm` (P5), or else the raw bytes.

    Raises:
        InvalidArgument: PACKAGE_MISMATCH: no inference, or another package's checkpoint; CHECKPOINT_INVALID;
            INVALID_FIELD: the input doesn't fit.
    """
    manifest = package.manifest
    if not manifest.capabilities.inference or not manifest.HasField("inference"):
        raise InvalidArgument(Reason.PACKAGE_MISMATCH, f"{manifest.name} {manifest.version} can't predict")
    data = encode_input(manifest.inference, source)
    capacity = sum(_bytes(tensor) for tensor in manifest.inference.outputs)
    with CheckpointReader(checkpoint) as reader:
        header = reader.header
        _check_fit(
            package, header.package_name, header.package_version, header.module_sha256, header.weight_count
        )
        weights = reader.read_weights()
        found = hashlib.sha256(weights.data).hexdigest()
        if found != header.weights_sha256:
            raise InvalidArgument(
                Reason.CHECKPOINT_INVALID,
                f"{checkpoint} is damaged: its weights hash to {found}, its header says "
                f"{header.weights_sha256}; export it again (covey checkpoint verify says all that is wrong)",
            )
    raw = run_inference(package, weights, data, capacity)
    if len(raw) != capacity:
        raise InvalidArgument(
            Reason.PACKAGE_MISMATCH,
            f"{manifest.name} wrote {len(raw)} bytes of output; its manifest declares {capacity}",
        )
    outputs, place = {}, 0
    for tensor in manifest.inference.outputs:
        values = np.frombuffer(raw, _DTYPES[tensor.dtype], prod(tensor.shape), place)
        outputs[tensor.name] = [value.item() for value in values]
        place += values.nbytes
    labels = list(manifest.inference.labels)
    first = prod(manifest.inference.outputs[0].shape)
    if labels and len(labels) != first:
        raise InvalidArgument(
            Reason.PACKAGE_MISMATCH,
            f"the manifest has {len(labels)} labels for {first} scores; it should have one each",
        )
    return Prediction(outputs, labels, header.round)


def _check_fit(package: Package, name: str, version: str, module_sha256: str, weight_count: int) -> None:
    manifest = package.manifest
    pairs = (
        ("name", name, manifest.name),
        ("version", version, manifest.version),
        ("module", module_sha256, manifest.module.sha256),
        ("weight count", str(weight_count), str(package.weight_count)),
    )
    wrong = [
        Violation(what, f"the checkpoint says {found}, the package {wanted}")
        for what, found, wanted in pairs
        if found != wanted
    ]
    if wrong:
        raise InvalidArgument(
            Reason.PACKAGE_MISMATCH, "the checkpoint isn't one of this package", violations=wrong
        )


def _bytes(tensor: package_pb2.TensorSpec) -> int:
    return prod(tensor.shape) * np.dtype(_DTYPES[tensor.dtype]).itemsize


def encode_input(spec: package_pb2.InferenceSpec, source: Path) -> bytes:
    """Returns the bytes that `covey_predict` takes, from a file.

    A `.npy` array is cast to the input's element type when no value changes by it; its number of elements
    must fit. A `.pgm` image gives its pixels: as they are for `U8`, divided by their maximum for `F32`.

    Raises:
        InvalidArgument: INVALID_FIELD: what was expected, what was found.
        OSError: the file can't be read.
    """
    wanted = sum(_bytes(tensor) for tensor in spec.inputs)
    suffix = source.suffix.lower()
    if suffix in {".npy", ".pgm"}:
        if len(spec.inputs) != 1:
            raise _wrong(
                source, f"the package takes {len(spec.inputs)} tensors; give their raw bytes in one file"
            )
        tensor = spec.inputs[0]
        values = _read_npy(source) if suffix == ".npy" else _read_pgm(source, tensor)
        return _cast(source, values, tensor)
    data = source.read_bytes()
    if len(data) != wanted:
        described = " and ".join(_describe(tensor) for tensor in spec.inputs)
        raise _wrong(source, f"expected {wanted} bytes ({described}), found {len(data)}")
    return data


def _describe(tensor: package_pb2.TensorSpec) -> str:
    shape = "×".join(map(str, tensor.shape)) or "scalar"
    return f"{tensor.name} {package_pb2.TensorSpec.DType.Name(tensor.dtype)} {shape}"


def _wrong(source: Path, text: str) -> InvalidArgument:
    return InvalidArgument(Reason.INVALID_FIELD, f"{source}: {text}")


def _read_npy(source: Path) -> npt.NDArray[np.generic]:
    try:
        with source.open("rb") as file:
            found: npt.NDArray[np.generic] = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise _wrong(source, f"isn't an .npy array: {error}") from error
    if found.dtype.kind not in "biuf":
        raise _wrong(source, "expected an array of numbers")
    return found


def _read_pgm(source: Path, tensor: package_pb2.TensorSpec) -> npt.NDArray[np.generic]:
    """Reads a binary PGM (`P5`, at most 8 bits a pixel)."""
    data = source.read_bytes()
    fields: list[int] = []
    place = 2
    try:
        if not data.startswith(b"P5"):
            raise ValueError("it doesn't begin with P5")
        while len(fields) < 3:
            while data[place : place + 1].isspace() or data[place : place + 1] == b"#":
                place = data.index(b"\n", place) + 1 if data[place : place + 1] == b"#" else place + 1
            end = place
            while data[end : end + 1].isdigit():
                end += 1
            fields.append(int(data[place:end]))
            place = end
    except ValueError as error:
        raise _wrong(source, f"isn't a binary PGM image: {error}") from error
    width, height, most = fields
    pixels = data[place + 1 :]
    if not 1 <= most <= 255 or len(pixels) != width * height:
        raise _wrong(
            source,
            f"{width}×{height} with values to {most}: expected one byte a pixel, found {len(pixels)} bytes",
        )
    image = np.frombuffer(pixels, np.uint8).reshape(height, width)
    if tensor.dtype == package_pb2.TensorSpec.F32:
        return image.astype(np.float32) / np.float32(most)
    return image


def _cast(source: Path, values: npt.NDArray[np.generic], tensor: package_pb2.TensorSpec) -> bytes:
    shape = tuple(tensor.shape)
    if values.size != prod(shape) or (values.ndim == len(shape) and values.shape != shape):
        raise _wrong(source, f"expected {_describe(tensor)}, found {'×'.join(map(str, values.shape))}")
    with np.errstate(all="ignore"):
        cast = values.astype(_DTYPES[tensor.dtype])
    exact = tensor.dtype == package_pb2.TensorSpec.F32 or np.array_equal(cast, values)
    if not exact:
        raise _wrong(source, f"expected {_describe(tensor)}; some values don't fit into that type")
    return cast.tobytes()
