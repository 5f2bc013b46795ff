"""The safetensors container: a length, a JSON header, then the tensors' bytes.

Format (https://github.com/huggingface/safetensors): 8 bytes little-endian header size N, N bytes of JSON
`{"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}}` (offsets count from the
end of the header), then the data, without holes. Files are hostile until proven otherwise: every bound is
checked before memory is taken.
"""

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from covey.v1 import checkpoint_pb2
from covey_kit.checkpoints.canonical import dump_json
from covey_kit.checkpoints.problems import Kind, problem

__all__ = [
    "MAX_HEADER_BYTES",
    "Container",
    "ContainerError",
    "Tensor",
    "encode_head",
    "load_json",
    "read_container",
]

MAX_HEADER_BYTES = 16 << 20
"""Longest JSON header that is read. 4,096 tensors with the longest names need 2 MiB."""

METADATA = "__metadata__"
_MAX_DIMENSIONS = 32
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file.

    Attributes:
        name: its key in the header.
        dtype: as in the file, such as `F32`.
        shape: its dimensions; a scalar has none.
        begin: first byte, counted from the end of the header.
        end: the byte behind its last.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """Number of elements: the product of the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Container:
    """A header that was read and checked.

    Attributes:
        metadata: the strings under `__metadata__`.
        tensors: by name, in the order of their bytes.
        data_offset: where in the file the tensors' bytes begin.
        data_bytes: how many bytes the tensors have by the header.
        file_bytes: how many bytes the file really has.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, Tensor]
    data_offset: int
    data_bytes: int
    file_bytes: int


class ContainerError(Exception):
    """The container can't be read; `problem` says why."""

    def __init__(self, kind: Kind.ValueType, message: str, tensor: str = "") -> None:
        super().__init__(message)
        self.problem: checkpoint_pb2.CheckpointProblem = problem(kind, message, tensor)


def encode_head(metadata: Mapping[str, str], tensors: Iterable[Tensor]) -> bytes:
    """Returns the length and the JSON header, padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, object] = {METADATA: dict(metadata)}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    text = dump_json(entries).encode("ascii")
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def read_container(descriptor: int) -> Container:
    """Reads and checks the header of an open file.

    A file that is shorter or longer than its header says is returned as it is: compare
    `data_offset + data_bytes` with `file_bytes`.

    Raises ContainerError.
    """
    file_bytes = os.fstat(descriptor).st_size
    length = _pread(descriptor, _LENGTH.size, 0)
    if len(length) < _LENGTH.size:
        raise ContainerError(
            Kind.KIND_TRUNCATED, f"the file has {file_bytes} bytes; a safetensors file has at least 8"
        )
    (size,) = _LENGTH.unpack(length)
    if not 2 <= size <= MAX_HEADER_BYTES:
        raise ContainerError(
            Kind.KIND_HEADER, f"the header's size is {size} bytes; expected 2 to {MAX_HEADER_BYTES}"
        )
    text = _pread(descriptor, size, _LENGTH.size)
    if len(text) < size:
        raise ContainerError(
            Kind.KIND_TRUNCATED, f"the file ends at byte {file_bytes}, inside its header of {size} bytes"
        )
    metadata, tensors = _parse(text)
    data_bytes = _check_cover(tensors)
    return Container(metadata, {t.name: t for t in tensors}, _LENGTH.size + size, data_bytes, file_bytes)


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        part = os.pread(descriptor, size, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        size -= len(part)
    return b"".join(parts)


def _no_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise ValueError(f"the key {name[:200]!r} is there twice")
            seen.add(name)
    return found


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} isn't JSON")


def load_json(text: bytes | str) -> object:
    """Parses strict JSON: no key twice, no NaN. Raises ValueError with a reason."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return cast("object", json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant))
    except RecursionError:
        raise ValueError("it's nested too deeply") from None


def _parse(text: bytes) -> tuple[dict[str, str], list[Tensor]]:
    try:
        header = load_json(text)
    except ValueError as error:
        raise ContainerError(Kind.KIND_HEADER, f"the header isn't JSON that can be read: {error}") from None
    if not isinstance(header, dict):
        raise ContainerError(Kind.KIND_HEADER, f"the header is a JSON {type(header).__name__}, not an object")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ContainerError(Kind.KIND_HEADER, f"`{METADATA}` isn't an object of strings")
    return metadata, sorted((_tensor(name, entry) for name, entry in header.items()), key=_place)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.begin, tensor.end


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _tensor(name: str, entry: object) -> Tensor:
    """Checks one entry. Its bytes must be what its shape needs (4 for each element of F32)."""

    def wrong(what: str) -> ContainerError:
        return ContainerError(Kind.KIND_HEADER, f"the entry of tensor {name[:200]!r} {what}", name[:200])

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise wrong("isn't an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or len(dtype) > 16:
        raise wrong("has a dtype that isn't a short string")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS or not all(map(_is_size, shape)):
        raise wrong(f"has a shape that isn't a list of at most {_MAX_DIMENSIONS} sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise wrong("has data_offsets that aren't two sizes")
    tensor = Tensor(name, dtype, tuple(shape), offsets[0], offsets[1])
    if tensor.begin > tensor.end:
        raise wrong(f"ends at byte {tensor.end}, before it begins at {tensor.begin}")
    if dtype == "F32" and tensor.elements * 4 != tensor.end - tensor.begin:
        raise wrong(
            f"has {tensor.end - tensor.begin} bytes; its shape {list(shape)} needs {tensor.elements * 4}"
        )
    return tensor


def _check_cover(tensors: Sequence[Tensor]) -> int:
    """Checks that the tensors follow each other without holes or overlaps; returns where the last ends."""
    end = 0
    for tensor in tensors:
        if tensor.begin != end:
            how = "overlaps the one before" if tensor.begin < end else "leaves a hole"
            raise ContainerError(
                Kind.KIND_HEADER,
                f"tensor {tensor.name[:200]!r} begins at byte {tensor.begin}; expected {end}: it {how}",
                tensor.name[:200],
            )
        end = tensor.end
    return end
