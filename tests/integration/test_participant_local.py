"""Packages on this machine without a coordinator."""

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import json_format

from covey.v1 import package_pb2
from covey_kit.errors import InvalidArgument, Reason
from covey_participant.runtime.local import LocalRunner, check_module, count_examples, predict
from support.wat_packages import WatPackage, write_package


def parsed(package: WatPackage) -> package_pb2.ModelPackage:
    """The manifest as a message."""
    return json_format.ParseDict(package.manifest, package_pb2.ModelPackage())


def test_examples_are_counted_by_the_modules_loader(tmp_path: Path) -> None:
    """Each file gets the count that the module returns for it."""
    package = write_package(tmp_path, units=7)
    (tmp_path / "empty.bin").write_bytes(b"")
    files = [package.data / "chunk-000.bin", tmp_path / "empty.bin"]

    assert count_examples(parsed(package), tmp_path / "model.wasm", files) == [7, 0]


def test_a_file_that_the_module_refuses_is_named_with_its_words(tmp_path: Path) -> None:
    """The error says which file, and what the module said."""
    package = write_package(tmp_path)
    (tmp_path / "odd.bin").write_bytes(b"12345")

    with pytest.raises(InvalidArgument, match=r"odd\.bin: .*multiple of 4") as caught:
        count_examples(parsed(package), tmp_path / "model.wasm", [tmp_path / "odd.bin"])
    assert caught.value.reason is Reason.MODULE_STATUS


def test_a_prediction_comes_from_the_weights_given(tmp_path: Path) -> None:
    """The adder adds the first weight; several predictions share a worker."""
    package = write_package(tmp_path)
    x = np.arange(4, dtype=np.float32)
    weights = np.full(8, 2.5, np.float32)

    assert np.frombuffer(
        predict(parsed(package), tmp_path / "model.wasm", weights, x.tobytes()), np.float32
    ).tolist() == [2.5, 3.5, 4.5, 5.5]
    with LocalRunner() as runner:
        for first in (1.0, 4.0):
            weights = np.full(8, first, np.float32)
            out = runner.predict(parsed(package), tmp_path / "model.wasm", weights, x.tobytes())
            assert np.frombuffer(out, np.float32).tolist() == (x + first).tolist()
        with pytest.raises(InvalidArgument, match="output buffer is too small"):
            runner.predict(parsed(package), tmp_path / "model.wasm", weights, x.tobytes(), capacity=4)


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        ("adder", []),
        ("missing-export", ["covey_step is missing", "covey_metrics is missing"]),
        ("forbidden-import", ["clock_time_get isn't offered", "env.secret isn't offered"]),
        ("wrong-signature", ["covey_metrics must be () -> (i32), found () -> (i64)"]),
        ("wrong-abi", ["covey_abi() is 7"]),
        ("weights-outside", ["covey_weights() points outside of memory"]),
        ("infinite-weights", ["weight 0 changed by inf"]),
        ("trap-initialize", ["covey_initialize() trapped: UNREACHABLE"]),
    ],
)
def test_every_violation_of_a_module_is_found(tmp_path: Path, variant: str, found: list[str]) -> None:
    """All of them at once, each a sentence; none for a module that behaves."""
    package = write_package(tmp_path, variant)

    problems = check_module(parsed(package), tmp_path / "model.wasm")

    assert len(problems) == len(found)
    for problem, words in zip(problems, found, strict=True):
        assert words in problem
