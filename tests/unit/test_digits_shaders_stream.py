"""What the digits packages hand to a GPU: the minibatches of TRAIN and EVALUATE, to the bit."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import wasmtime

from support import digits_reference as reference
from support.digits_reference import PIXELS, Array
from support.packages import DIGITS, MODELS, load_script, manifest, training_chunks, weight_count
from support.wasm_harness import EVALUATE, STREAM_EVALUATE, STREAM_TRAIN, TRAIN, ModuleError, WasmModule

PACKAGES = [DIGITS, MODELS / "digits-cnn"]
SEED, BATCH, EPOCHS, SHIFT = 11, 16, 2, 3
FIRST, UNITS = 5, 100
IMAGES, LABELS = 0, 1


@pytest.fixture(params=PACKAGES, ids=lambda package: package.name)
def package(request: pytest.FixtureRequest) -> Path:
    """Each package that reads digits-v1."""
    path: Path = request.param
    return path


def ready(package: Path) -> WasmModule:
    """An instance with the first chunk loaded, the weights of round 0, and images that move."""
    module = WasmModule(package / "model.wasm", manifest(package)["limits"]["memoryPages"])
    module.configure([0.9, float(SHIFT)], seed=SEED, batch=BATCH, rate=0.05, epochs=EPOCHS)
    module.check("initialize", SEED)
    module.load(training_chunks(DIGITS)[0])
    return module


def stream(module: WasmModule, phase: int, first: int, units: int) -> list[tuple[int, Array, Array]]:
    """All minibatches: units left after each, images [n, 784], labels [n]."""
    module.check("begin", phase, first, units)
    found, left = [], -1
    while left:
        left = module.check("step")
        images = module.tensor(IMAGES, "<f4").reshape(-1, PIXELS).copy()
        found.append((left, images, module.tensor(LABELS, "<u4").copy()))
    return found


def test_training_stream_is_trains_order_and_augmentation(package: Path) -> None:
    """STREAM_TRAIN's images are byte for byte those of the description: shuffled, moved, scaled."""
    raw, labels = reference.decode_chunk(training_chunks(DIGITS)[0])
    x, at = reference.scaled(raw), 0
    batches = stream(ready(package), STREAM_TRAIN, FIRST, UNITS)
    for epoch in range(EPOCHS):
        order = reference.epoch_order(SEED, epoch, FIRST, UNITS)
        for start in range(0, UNITS, BATCH):
            which = order[start : start + BATCH]
            left, images, found = batches[at]
            at += 1
            moved = np.stack([reference.shifted(x[unit], unit, SEED, epoch, SHIFT) for unit in which])

            assert images.tobytes() == moved.astype("<f4").tobytes()
            assert found.tolist() == labels[which].tolist()
            assert left == UNITS * EPOCHS - epoch * UNITS - start - len(which)
    assert at == len(batches)


def test_training_computes_on_what_is_streamed(package: Path) -> None:
    """The loss of every minibatch of TRAIN is, to the bit, that of the streamed images as they are.

    Each step of TRAIN starts from the weights of round 0. The streamed images, written as a chunk, are
    evaluated with the same weights.
    """
    encode = load_script(DIGITS / "tools" / "make_chunks.py").encode_chunk
    batches = stream(ready(package), STREAM_TRAIN, FIRST, UNITS)
    trained, judge = ready(package), ready(package)
    start = trained.weights(weight_count(package))
    trained.check("begin", TRAIN, FIRST, UNITS)
    before = 0.0
    for left, images, labels in batches:
        trained.set_weights(start)
        assert trained.check("step") == left
        total = float(trained.view(trained.call("metrics"), 1, "<f8")[0])
        pixels = np.rint(images * 255).astype(np.uint8)
        rows = [(int(y), row.tobytes()) for y, row in zip(labels, pixels, strict=True)]
        judge.run(EVALUATE, 0, judge.load(encode(28, 28, rows)))
        alone = float(judge.view(judge.call("metrics"), 1, "<f8")[0])

        assert total - before == pytest.approx(alone, abs=1e-12)
        before = total


def test_evaluation_stream_takes_units_as_they_lie(package: Path) -> None:
    """STREAM_EVALUATE goes once through the units, unmoved, in minibatches of batchSize."""
    raw, labels = reference.decode_chunk(training_chunks(DIGITS)[0])
    batches = stream(ready(package), STREAM_EVALUATE, FIRST, UNITS)
    images = np.concatenate([images for _, images, _ in batches])

    assert images.tobytes() == reference.scaled(raw)[FIRST : FIRST + UNITS].tobytes()
    assert np.concatenate([found for *_, found in batches]).tolist() == labels[FIRST : FIRST + UNITS].tolist()
    assert [before - after for before, after in pairwise([UNITS] + [left for left, *_ in batches])] == [
        *[BATCH] * (UNITS // BATCH),
        UNITS % BATCH,
    ]


def test_streams_change_neither_weights_nor_metrics(package: Path) -> None:
    """A stream trains nothing and measures nothing: both are the GPU's."""
    module = ready(package)
    before = module.weights(weight_count(package))
    stream(module, STREAM_TRAIN, 0, 40)

    np.testing.assert_array_equal(module.weights(before.size), before)
    assert module.metrics(2) == [None, None]


def test_empty_stream_ends_with_its_first_step(package: Path) -> None:
    """Of zero units there is one step, which returns 0 with nothing in the tensors; so after the last."""
    module = ready(package)
    module.check("begin", STREAM_TRAIN, 3, 0)
    assert module.check("step") == 0
    assert module.tensor(IMAGES, "<f4").size == module.tensor(LABELS, "<u4").size == 0
    stream(module, STREAM_EVALUATE, 0, 3)
    assert module.tensor(LABELS, "<u4").size == 3

    assert module.check("step") == 0
    assert module.tensor(LABELS, "<u4").size == 0


def test_unknown_tensors_are_null(package: Path) -> None:
    """Only two tensors are there; others are a null pointer, not a trap."""
    module = ready(package)

    assert module.call("tensor", 2) == module.call("tensor", -1) == module.call("tensor", 2**31 - 1) == 0


def test_stream_ends_with_what_it_read(package: Path) -> None:
    """A failed or new load, and TRAIN, empty the tensors; nothing dangles."""
    module = ready(package)
    for disturb in (
        lambda: module.load(training_chunks(DIGITS)[1]),
        lambda: module.run(TRAIN, 0, 16),
        lambda: module.configure([0.9, 0.0]),
    ):
        module.check("begin", STREAM_TRAIN, 0, 16)
        module.check("step")
        assert module.tensor(LABELS, "<u4").size == 16
        disturb()

        assert module.tensor(IMAGES, "<f4").size == module.tensor(LABELS, "<u4").size == 0


def smallest(package: Path) -> WasmModule:
    """An instance with as little memory as batches of 512 and a chunk need."""
    too_few, enough = 0, 1024
    found = None
    while enough - too_few > 1:
        pages = (too_few + enough) // 2
        try:
            module = WasmModule(package / "model.wasm", pages)
            module.configure([0.9, 0.0], batch=512)
            module.load(training_chunks(DIGITS)[0])
        except (ModuleError, wasmtime.WasmtimeError):
            too_few = pages
        else:
            enough, found = pages, module
    assert found is not None
    return found


def test_stream_says_when_memory_is_short(package: Path) -> None:
    """Tensors that don't fit the host's limit are an error in words, and nothing is begun."""
    module = smallest(package)
    with pytest.raises(ModuleError, match="no memory for tensors of 512 images"):
        module.check("begin", STREAM_TRAIN, 0, 16)

    assert module.call("step") < 0
