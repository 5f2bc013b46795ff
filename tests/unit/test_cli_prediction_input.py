"""What `covey predict` makes of an input file."""

from pathlib import Path

import numpy as np
import pytest

from covey.prediction import encode_input
from covey.v1 import package_pb2
from covey_kit.errors import InvalidArgument

U8, F32, I32 = package_pb2.TensorSpec.U8, package_pb2.TensorSpec.F32, package_pb2.TensorSpec.I32


def spec(dtype: package_pb2.TensorSpec.DType.ValueType, *shape: int) -> package_pb2.InferenceSpec:
    """An inference with one input."""
    made = package_pb2.InferenceSpec()
    made.inputs.add(name="image", dtype=dtype, shape=shape)
    return made


def test_raw_bytes_pass_as_they_are_when_their_number_fits(tmp_path: Path) -> None:
    """Too few or too many are refused with both numbers."""
    path = tmp_path / "x.raw"
    path.write_bytes(bytes(range(6)))

    assert encode_input(spec(U8, 2, 3), path) == bytes(range(6))
    with pytest.raises(InvalidArgument, match=r"expected 24 bytes \(image F32 2×3\), found 6"):
        encode_input(spec(F32, 2, 3), path)


def test_an_array_is_cast_when_no_value_changes(tmp_path: Path) -> None:
    """Integers fit into bytes and floats; 300 and 0.5 don't fit into a byte."""
    path = tmp_path / "x.npy"
    np.save(path, np.arange(6, dtype=np.int64).reshape(2, 3))

    assert encode_input(spec(U8, 2, 3), path) == bytes(range(6))
    assert encode_input(spec(F32, 2, 3), path) == np.arange(6, dtype="<f4").tobytes()
    assert encode_input(spec(I32, 6), path) == np.arange(6, dtype="<i4").tobytes()
    for wrong in (300.0, 0.5, -1.0):
        np.save(path, np.array([wrong]))
        with pytest.raises(InvalidArgument, match="don't fit into that type"):
            encode_input(spec(U8, 1), path)


def test_an_array_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Three by two isn't two by three, though it has as many elements."""
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((3, 2)))

    with pytest.raises(InvalidArgument, match="expected image U8 2×3, found 3×2"):
        encode_input(spec(U8, 2, 3), path)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"PK\x03\x04 not an array"])
def test_a_file_that_is_no_array_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    """Pickles and damaged files never run or crash anything."""
    path = tmp_path / "x.npy"
    path.write_bytes(content)

    with pytest.raises(InvalidArgument, match="array"):
        encode_input(spec(U8, 1), path)


def test_an_image_gives_its_pixels(tmp_path: Path) -> None:
    """As bytes for U8, as fractions of their maximum for F32; comments in the header are skipped."""
    path = tmp_path / "x.pgm"
    path.write_bytes(b"P5\n# by hand\n3 2\n# maximum\n200\n" + bytes([0, 50, 100, 150, 200, 10]))

    as_bytes = encode_input(spec(U8, 2, 3), path)
    as_floats = np.frombuffer(encode_input(spec(F32, 2, 3), path), "<f4")

    assert as_bytes == bytes([0, 50, 100, 150, 200, 10])
    assert as_floats.tolist() == pytest.approx([0, 0.25, 0.5, 0.75, 1, 0.05])


@pytest.mark.parametrize(
    "content",
    [b"P2\n1 1\n255\n0", b"P5\n", b"P5\n2 2\n255\nabc", b"P5\n1 1\n65535\n\0\0", b"P5 x 1 255\n0", b"P5 #"],
)
def test_an_image_that_isnt_one_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    """Other kinds of PGM and cut files too."""
    path = tmp_path / "x.pgm"
    path.write_bytes(content)

    with pytest.raises(InvalidArgument, match=r"x\.pgm"):
        encode_input(spec(U8, 1, 1), path)


def test_several_inputs_come_as_raw_bytes_only(tmp_path: Path) -> None:
    """One array can't say where it ends and the next begins."""
    several = spec(U8, 2)
    several.inputs.add(name="scale", dtype=F32, shape=[1])
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(2, np.uint8))
    raw = tmp_path / "x.raw"
    raw.write_bytes(bytes(6))

    assert encode_input(several, raw) == bytes(6)
    with pytest.raises(InvalidArgument, match="takes 2 tensors"):
        encode_input(several, path)
