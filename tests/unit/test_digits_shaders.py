"""The shader plan of `digits`: it fits every GPU, and trains as the module does on the CPU.

Tests that need an adapter skip with the reason where there is none; a software Vulkan driver will do.
"""

import zipfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from covey_participant.domain.values import Adapter
from support import digits_reference as reference
from support.digits_reference import HIDDEN, PIXELS, WEIGHTS, Array, Reference
from support.gpu import WEBGPU_DEFAULTS, GpuModel, adapter, checked_plan, facts
from support.packages import DIGITS, defaults, manifest, training_chunks
from support.wasm_harness import EVALUATE, TRAIN, WasmModule

SEED = 5


@pytest.fixture(scope="module")
def chunk() -> bytes:
    """The first training chunk."""
    return training_chunks(DIGITS)[0]


class Pair:
    """The package on the CPU and on the GPU, with the same chunk, settings and weights of round 0."""

    def __init__(self, chunk: bytes, own: list[float], **settings: Any) -> None:
        self.cpu = WasmModule(DIGITS / "model.wasm", manifest(DIGITS)["limits"]["memoryPages"])
        self.cpu.configure(own, seed=SEED, **settings)
        self.cpu.check("initialize", SEED)
        self.start = self.cpu.weights(WEIGHTS)
        self.cpu.load(chunk)
        self.gpu = GpuModel(DIGITS, own, seed=SEED, **settings)
        self.gpu.module.load(chunk)
        self.gpu.set_weights(self.start)

    def updates(self) -> tuple[Array, Array]:
        """How far the weights are from the start, on the CPU and on the GPU."""
        start = self.start.astype(np.float64)
        return self.cpu.weights(WEIGHTS) - start, self.gpu.weights() - start


@pytest.fixture
def pair(chunk: bytes) -> Iterator[Any]:
    """Makes pairs, and gives the GPU's memory back."""
    found = adapter()
    if isinstance(found, str):
        pytest.skip(found)
    made: list[Pair] = []

    def make(own: list[float], **settings: Any) -> Pair:
        made.append(Pair(chunk, own, **settings))
        return made[-1]

    yield make
    for each in made:
        each.gpu.close()


def distance(found: Array, wanted: Array) -> float:
    """The relative L2 distance."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def tensors(flat: Array) -> list[Array]:
    """The four tensors of a flat array."""
    return Reference(flat, 0, 0).split(flat)


# ---- Without a GPU ----------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 16, 33, 512])
def test_plan_fits_the_least_webgpu_device(batch: int) -> None:
    """With any batch size the plan needs no limit above WebGPU's defaults, and no feature."""
    least = Adapter("any", "IntegratedGPU", "Vulkan", limits=WEBGPU_DEFAULTS)
    plan = checked_plan(DIGITS, facts(DIGITS, defaults(DIGITS)[0], batch=batch), least)

    assert plan.memory_bytes < 64 << 20
    assert "requires" not in manifest(DIGITS)["backends"][1]


def test_archive_holds_the_sources() -> None:
    """The archive is the files in shaders/, stored, with nothing in it that depends on when or where."""
    with zipfile.ZipFile(DIGITS / "shaders.zip") as archive:
        entries = archive.infolist()
        packed = {entry.filename: archive.read(entry) for entry in entries}

    assert packed == {path.name: path.read_bytes() for path in (DIGITS / "shaders").iterdir()}
    assert {(entry.date_time, entry.compress_type) for entry in entries} == {((1980, 1, 1, 0, 0, 0), 0)}


# ---- The same as the CPU ----------------------------------------------------------------------


def test_hundred_steps_agree_with_the_cpu(pair: Any) -> None:
    """After 100 steps of SGD with momentum and shifts, the updates agree to 1e-4 relative L2.

    Measured on lavapipe with three seeds: at most 5e-7.
    """
    both = pair([0.9, 1.0], batch=16, rate=0.04, epochs=5)
    both.cpu.run(TRAIN, 0, 320)
    metrics = both.gpu.run(TRAIN, 0, 320)
    cpu, gpu = both.updates()

    assert distance(gpu, cpu) < 1e-5
    assert metrics == pytest.approx(both.cpu.metrics(2), rel=1e-5)


def test_loss_curves_lie_on_each_other(pair: Any) -> None:
    """Summed up to any point, loss and hits of the training minibatches are the CPU's: 1e-6 and no hit."""
    both = pair([0.9, 1.0], batch=16, rate=0.02, epochs=4)
    both.cpu.check("begin", TRAIN, 0, 375)
    curve, left = {}, -1
    while left:
        left = both.cpu.check("step")
        sums = both.cpu.view(both.cpu.call("metrics"), 4, "<f8").reshape(2, 2).copy()
        curve[int(sums[0, 1])] = sums
    points = 0
    for totals in both.gpu.totals(TRAIN, 0, 375):
        if totals.units:
            points += 1
            np.testing.assert_allclose(totals.metrics[0], curve[totals.units][0], rtol=1e-6)
            np.testing.assert_allclose(totals.metrics[1], curve[totals.units][1], atol=1e-9)

    assert totals.units == 1500
    assert points > 5


@pytest.mark.parametrize("batch", [1, 2, 7, 33, 375])
def test_short_minibatches_agree_with_the_cpu(pair: Any, batch: int) -> None:
    """Batch sizes that fit no tile, and a last minibatch that is shorter still, give the CPU's update.

    One operation's tolerance: each tensor to 1e-5 relative L2; measured: at most 2e-6.
    """
    both = pair([0.5, 0.0], batch=batch, rate=0.05)
    both.cpu.run(TRAIN, 3, 2 * batch if batch < 20 else 50)
    both.gpu.run(TRAIN, 3, 2 * batch if batch < 20 else 50)
    for cpu, gpu in zip(*map(tensors, both.updates()), strict=True):
        assert distance(gpu, cpu) < 1e-5


def test_evaluation_agrees_with_the_cpu(pair: Any) -> None:
    """Loss and accuracy of trained weights are the CPU's, and evaluation changes nothing."""
    both = pair([0.9, 1.0], batch=64, rate=0.05, epochs=2)
    both.cpu.run(TRAIN, 0, 375)
    trained = both.cpu.weights(WEIGHTS)
    both.gpu.set_weights(trained)
    held_out = (DIGITS / "validation.bin").read_bytes()
    both.cpu.load(held_out)
    both.gpu.module.load(held_out)
    both.cpu.run(EVALUATE, 0, 2000)
    loss, accuracy = both.gpu.run(EVALUATE, 0, 2000)

    assert loss == pytest.approx(both.cpu.metrics(2)[0], rel=1e-6)
    assert accuracy == both.cpu.metrics(2)[1]
    np.testing.assert_array_equal(both.gpu.weights(), trained)


def test_training_repeats_to_the_bit(pair: Any) -> None:
    """The same work from the same weights gives the same bits on one device: velocity starts from rest."""
    both = pair([0.9, 1.0], batch=16, rate=0.04)
    both.gpu.run(TRAIN, 0, 200)
    first = both.gpu.weights()
    both.gpu.set_weights(both.start)
    both.gpu.run(TRAIN, 0, 200)

    np.testing.assert_array_equal(both.gpu.weights(), first)


@pytest.mark.timeout(180)  # NumPy's threads wait for each other where cores are few
def test_both_gradients_are_the_derivative_of_the_loss(pair: Any, chunk: bytes) -> None:
    """One step moves each weight by minus the rate times the derivative: central differences in f64.

    Of each tensor 12 weights, or all; of the hidden weights, those of inked pixels. The f32 weights, below
    0.3, round the update to 3e-8.
    """
    units, rate = 16, 1.0
    both = pair([0.0, 0.0], batch=64, rate=rate)
    both.cpu.run(TRAIN, 0, units)
    both.gpu.run(TRAIN, 0, units)
    images, labels = reference.decode_chunk(chunk)
    x, y = reference.scaled(images)[:units].astype(np.float64), labels[:units]
    chooser, chosen, at = np.random.default_rng(3), [], 0
    for shape in reference.SHAPES:
        size = int(np.prod(shape))
        picks = chooser.permutation(size)[:12]
        if shape == (PIXELS, HIDDEN):
            picks = chooser.choice(np.flatnonzero(x.sum(axis=0) > 2), 12) * HIDDEN + picks % HIDDEN
        chosen += [at + int(pick) for pick in picks]
        at += size
    expected = []
    for index in chosen:
        sides = []
        for step in (1e-6, -1e-6):
            moved = both.start.astype(np.float64)
            moved[index] += step
            sides.append(Reference(moved, 0, 0).losses(x, y).mean())
        expected.append((sides[0] - sides[1]) / 2e-6)

    assert np.count_nonzero(np.abs(expected) > 1e-3) > 25
    for update in both.updates():
        np.testing.assert_allclose(-update[chosen] / rate, expected, atol=2e-6)
