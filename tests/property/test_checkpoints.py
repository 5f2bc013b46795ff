"""Checkpoint files: whatever is written reads back, equal training gives equal bytes, and damage is found."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from covey.v1 import checkpoint_pb2, common_pb2, package_pb2
from covey_kit.checkpoints import (
    CheckpointError,
    CheckpointReader,
    CheckpointWriter,
    canonical_json,
    examine,
    first_not_finite,
    verify,
)
from covey_kit.errors import FailedPrecondition, Reason
from support.storage import PARAMETERS, header, join_file, split_file, weights, write_checkpoint

names = st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9_./-]{0,20}\Z").filter(lambda name: name != "__metadata__")
shapes = st.lists(st.integers(1, 5), max_size=3)
finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def headers(draw: st.DrawFn) -> checkpoint_pb2.CheckpointHeader:
    """Headers as a coordinator could make them."""
    found = checkpoint_pb2.CheckpointHeader(
        package_name=draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)),
        package_version=draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=10)),
        module_sha256=draw(st.from_regex(r"\A[0-9a-f]{64}\Z")),
        round=draw(st.integers(0, 2**32 - 1)),
        units=draw(st.integers(0, 2**64 - 1)),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )
    for index in range(draw(st.integers(0, 3))):
        metric = found.metrics.add(name=f"m{index}", count=abs(draw(finite)))
        if draw(st.booleans()):
            metric.sum = draw(finite)
    if draw(st.booleans()):
        found.position.experience.next_unit = draw(st.integers(0, 2**64 - 1))
    found.backends.extend(draw(st.sets(st.sampled_from([common_pb2.CPU_WASM, common_pb2.GPU_WGPU]))))
    return found


def write(
    path: Path,
    head: checkpoint_pb2.CheckpointHeader,
    parameters: list[package_pb2.Parameter],
    states: dict[str, Any],
    values: Any,
    step: int,
) -> checkpoint_pb2.CheckpointHeader:
    """Writes a checkpoint in blocks of `step` elements."""
    with CheckpointWriter(path, head, parameters, list(states)) as writer:
        for start in range(0, len(values), step):
            writer.write_weights(values[start : start + step], start)
            for name, state in states.items():
                writer.write_optimizer(name, state[start : start + step], start)
        return writer.finish()


@given(
    headers(),
    st.lists(st.tuples(names, shapes), min_size=1, max_size=5, unique_by=lambda pair: pair[0]),
    st.integers(0, 2),
    st.integers(1, 200),
    st.integers(0, 2**32 - 1),
)
def test_what_is_written_reads_back(
    head: checkpoint_pb2.CheckpointHeader,
    tensors: list[tuple[str, list[int]]],
    optimizers: int,
    step: int,
    seed: int,
) -> None:
    """Header, weights and optimizer read back equal; safetensors agrees; block sizes leave no trace."""
    parameters = [package_pb2.Parameter(name=name, shape=shape) for name, shape in tensors]
    count = sum(int(np.prod(shape)) for _, shape in tensors)
    random = np.random.default_rng(seed)
    values = random.normal(size=count).astype(np.float32)
    states = {
        f"optimizer.{'mv'[index]}": random.normal(size=count).astype(np.float32)
        for index in range(optimizers)
    }
    with tempfile.TemporaryDirectory() as name:
        path, other = Path(name, "a"), Path(name, "b")
        written = write(path, head, parameters, states, values, step)
        write(other, head, parameters, states, values, count)

        assert verify(path, expected_sha256=hashlib.sha256(path.read_bytes()).hexdigest()) == []
        assert other.read_bytes() == path.read_bytes()
        with CheckpointReader(path) as reader:
            assert reader.header == written
            assert reader.read_weights().tobytes() == values.tobytes()
            assert (
                reader.read_weights(count // 2, count - count // 2).tobytes()
                == values[count // 2 :].tobytes()
            )
            for state, expected in states.items():
                assert reader.read_optimizer(state).tobytes() == expected.tobytes()
            begin = reader.weights_offset
            assert path.read_bytes()[begin : begin + reader.weights_bytes] == values.tobytes()
        loaded = load_file(path)
        start = 0
        for tensor, shape in tensors:
            assert loaded[tensor].shape == tuple(shape)
            size = int(np.prod(shape))
            assert loaded[tensor].tobytes() == values[start : start + size].tobytes()
            start += size
        with safe_open(path, "numpy") as opened:
            assert json.loads(opened.metadata()["covey"]) == json.loads(canonical_json(written))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid checkpoint."""
    return write_checkpoint(tmp_path_factory.mktemp("sound") / "c")


@given(st.data())
@settings(max_examples=300)
def test_damage_at_any_byte_is_found(sound: bytes, data: st.DataObject) -> None:
    """One changed byte anywhere is found by the file's digest; among tensors by their own, too."""
    position = data.draw(st.integers(0, len(sound) - 1))
    flip = data.draw(st.integers(1, 255))
    damaged = sound[:position] + bytes([sound[position] ^ flip]) + sound[position + 1 :]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "c")
        path.write_bytes(damaged)
        known = verify(path, expected_sha256=hashlib.sha256(sound).hexdigest())
        alone = verify(path)

    assert known[0].kind == checkpoint_pb2.CheckpointProblem.KIND_FILE_DIGEST
    tensors_begin = 8 + int.from_bytes(sound[:8], "little")
    if position >= tensors_begin:
        assert {p.kind for p in alone} & {
            checkpoint_pb2.CheckpointProblem.KIND_WEIGHTS_DIGEST,
            checkpoint_pb2.CheckpointProblem.KIND_OPTIMIZER_DIGEST,
        }


def _kind(problem: checkpoint_pb2.CheckpointProblem) -> int:
    return problem.kind


DIGESTS = {
    checkpoint_pb2.CheckpointProblem.KIND_WEIGHTS_DIGEST,
    checkpoint_pb2.CheckpointProblem.KIND_OPTIMIZER_DIGEST,
    checkpoint_pb2.CheckpointProblem.KIND_NOT_FINITE,
}
"""What only reading the tensors shows: a reader doesn't."""


@given(st.data())
@settings(max_examples=300)
def test_any_cut_or_splice_is_survived(sound: bytes, data: st.DataObject) -> None:
    """Cut, repeated and spliced files are answered with problems, never with another exception."""
    begin = data.draw(st.integers(0, len(sound)))
    end = data.draw(st.integers(0, len(sound)))
    junk = data.draw(st.binary(max_size=40))
    spliced = sound[:begin] + junk + sound[end:]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "c")
        path.write_bytes(spliced)
        problems = verify(path)
        if spliced != sound and len(spliced) != len(sound):
            assert problems
        if problems and not set(map(_kind, problems)) & DIGESTS:
            with pytest.raises(CheckpointError) as caught:
                CheckpointReader(path)
            assert caught.value.reason is Reason.CHECKPOINT_INVALID
            assert caught.value.problems


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)


@given(json_values, st.sampled_from(["outer", "metadata", "entry", "shape", "offsets", "inner", "field"]))
@settings(max_examples=300)
def test_any_json_in_any_place_is_survived(sound: bytes, value: Any, place: str) -> None:
    """Whatever JSON stands where a header, an entry or a field should be, there are only problems."""
    outer, inner, body = split_file(sound)
    if place == "metadata":
        outer["__metadata__"] = value
    elif place == "entry":
        outer["scale"] = value
    elif place in {"shape", "offsets"}:
        outer["scale"]["shape" if place == "shape" else "data_offsets"] = value
    elif place == "field":
        inner["weightCount"] = inner["metrics"] = value
    outer_value = value if place == "outer" else outer
    if place == "inner":
        outer_value = {**outer, "__metadata__": {"covey": json.dumps(value)}}
    elif place == "field":
        outer_value = {**outer, "__metadata__": {"covey": json.dumps(inner)}}
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "c")
        path.write_bytes(join_file(outer_value, None, body))

        found = examine(path)

    assert found.problems or found.header is not None


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":{"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551616]}}',
        b'{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
        b'{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"__metadata__":{"covey":"{\\"round\\":1,\\"round\\":2}"}}',
        b'{"__metadata__":{"covey":"' + b"[" * 5000 + b'"}}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":"\xff\xfe"}',
        b"\x00" * 100,
        b"null",
        b'"' + b"\\ud800" * 100 + b'"',
    ],
)
def test_hostile_headers_are_refused(tmp_path: Path, text: bytes) -> None:
    """Huge shapes, wrapping offsets, keys that come twice, deep nesting and the like are HEADER, cheaply."""
    path = tmp_path / "c"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    problems = verify(path)

    assert [p.kind for p in problems][-1] == checkpoint_pb2.CheckpointProblem.KIND_HEADER
    with pytest.raises(CheckpointError):
        CheckpointReader(path)


def test_a_header_that_claims_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    """A sparse file whose header claims 8 GiB is refused by its length alone."""
    path = tmp_path / "c"
    with path.open("wb") as file:
        file.write((8 << 30).to_bytes(8, "little"))
        file.truncate(9 << 20)

    assert "header's size" in verify(path)[0].message


GOLDEN = "2d5f17c4ca2991849fa28bc5d7c9b837c6219d431fef06af14cbb690a92aa53f"
"""SHA-256 of the file below."""


def test_bytes_are_canonical(tmp_path: Path) -> None:
    """The bytes of a fixed checkpoint never change, from run to run and from version to version."""
    values = np.arange(29, dtype=np.float32) / 8 - 1
    write(tmp_path / "c", header(), list(PARAMETERS), {"optimizer.v": values * 2}, values, 7)

    assert hashlib.sha256((tmp_path / "c").read_bytes()).hexdigest() == GOLDEN


def test_safetensors_itself_refuses_what_we_refuse(sound: bytes, tmp_path: Path) -> None:
    """The library agrees on a cut file, so that nobody opens what verification would reject."""
    path = tmp_path / "c"
    path.write_bytes(sound[:-4])
    with pytest.raises(SafetensorError):
        load_file(path)

    assert verify(path)


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    """NaN and infinity are refused with the element's number, and no file is left."""
    for bad in (np.nan, np.inf, -np.inf):
        values = weights()
        values[20] = bad
        with pytest.raises(FailedPrecondition) as caught:
            write(tmp_path / "c", header(), list(PARAMETERS), {}, values, 8)
        assert caught.value.reason is Reason.RESULT_NOT_FINITE
        assert "element 20" in caught.value.message
    assert list(tmp_path.iterdir()) == []


def test_blocks_come_in_order_and_whole(tmp_path: Path) -> None:
    """Gaps, repeats, too many elements, other dtypes and unfinished tensors are refused; nothing is left."""
    values = weights()
    with CheckpointWriter(tmp_path / "c", header(), PARAMETERS, ["optimizer.m"]) as writer:
        writer.write_weights(values[:10], 0)
        for block, start in ((values[:5], 5), (values[11:], 11), (np.concatenate([values, values]), 10)):
            with pytest.raises(ValueError, match="expected element 10"):
                writer.write_weights(block, start)
        with pytest.raises(TypeError, match="float64"):
            writer.write_weights(values[10:].astype(np.float64), 10)
        writer.write_weights(values[10:], 10)
        with pytest.raises(ValueError, match=r"optimizer\.m: 0 of 29"):
            writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_breaks_the_contract_is_not_written(tmp_path: Path) -> None:
    """All violations are told before a byte is written; names that clash are refused."""
    wrong = checkpoint_pb2.CheckpointHeader(module_sha256="x")
    with pytest.raises(CheckpointError) as caught:
        CheckpointWriter(tmp_path / "c", wrong, PARAMETERS)
    for field in ("package_name", "package_version", "module_sha256"):
        assert field in caught.value.message
    for clash in ([PARAMETERS[0], PARAMETERS[0]], [package_pb2.Parameter(name="__metadata__")]):
        with pytest.raises(CheckpointError, match="differ"):
            CheckpointWriter(tmp_path / "c", header(), clash)
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.floats(width=32), min_size=1, max_size=60))
def test_the_first_number_that_is_none_is_found(values: list[float]) -> None:
    """`first_not_finite` names the first NaN or infinity; large finite numbers don't fool it."""
    block = np.array(values, np.float32)
    expected = next((index for index, value in enumerate(values) if not np.isfinite(value)), None)

    assert first_not_finite(block) == expected
