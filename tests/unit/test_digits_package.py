"""The package `digits` as a host meets it: files, ABI, and what it does with bytes that aren't a chunk."""

import hashlib
import json
import struct
from typing import Any

import numpy as np
import protovalidate
import pytest
from google.protobuf import json_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from covey.v1 import dataset_pb2, package_pb2
from support.digits_reference import PIXELS, WEIGHTS, decode_chunk
from support.packages import DIGITS, defaults, manifest, training_chunks, weight_count
from support.wasm_harness import EVALUATE, PLAY, TRAIN, UPDATE, ModuleError, WasmModule

BAD_ARGUMENT, BAD_DATA, BAD_STATE, NO_MEMORY, UNSUPPORTED, DIVERGED = range(-1, -7, -1)
OWN = [0.9, 1.0]
BLANK = bytes((127,)) * 6 + bytes((15,))  # 784 pixels of 0


def chunk(
    *images: bytes, count: int | None = None, rows: int = 28, version: int = 1, magic: bytes = b"DIGS"
) -> bytes:
    """A chunk of encoded images, with a header that may lie."""
    head = struct.pack("<4s4I", magic, version, rows, 28, len(images) if count is None else count)
    return head + b"".join(images)


@pytest.fixture
def module() -> WasmModule:
    """A fresh instance with the memory that the manifest allows, configured, with the weights of round 0."""
    made = WasmModule(DIGITS / "model.wasm", manifest(DIGITS)["limits"]["memoryPages"])
    made.configure(OWN)
    made.check("initialize", 1)
    return made


# ---- Files ------------------------------------------------------------------------------------


def test_manifest_is_a_valid_model_package() -> None:
    """The manifest is a ModelPackage of the contract, without unknown keys, and breaks none of its rules."""
    package = json_format.Parse((DIGITS / "manifest.json").read_text(), package_pb2.ModelPackage())

    protovalidate.validate(package)
    assert package.name == "digits"
    assert [(h.name, h.default) for h in package.hyperparameters][:3] == [
        ("batchSize", 16),
        ("learningRate", 0.04),
        ("localEpochs", 8),
    ]


def test_declared_files_are_the_files() -> None:
    """Sizes and digests of the manifest are those of the module and the held-out file."""
    for entry in (manifest(DIGITS)["module"], manifest(DIGITS)["validation"]):
        data = (DIGITS / entry["fileName"]).read_bytes()

        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


def test_dataset_is_valid_and_complete(module: WasmModule) -> None:
    """Every chunk has its declared size, digest and example count, and the contract's rules hold."""
    entries = json.loads((DIGITS / "data" / "dataset.json").read_text())
    dataset = dataset_pb2.DatasetManifest()
    for entry in entries:
        json_format.ParseDict(entry, dataset.chunks.add())

    protovalidate.validate(dataset)
    assert sum(entry["exampleCount"] for entry in entries) == 12000
    for entry, data in zip(entries, training_chunks(DIGITS), strict=True):
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert module.load(data) == entry["exampleCount"]
        assert entry["format"] in manifest(DIGITS)["dataFormats"]


def test_chunks_hold_every_class_evenly() -> None:
    """Chunks are stratified: a class's share differs between chunks by one image at most."""
    counts = np.array([np.bincount(decode_chunk(data)[1], minlength=10) for data in training_chunks(DIGITS)])

    assert (counts.max(axis=0) - counts.min(axis=0)).max() <= 1


def test_held_out_images_are_not_trained_on(module: WasmModule) -> None:
    """No image of the held-out file is in a training chunk."""
    held_out, _ = decode_chunk((DIGITS / "validation.bin").read_bytes())
    trained = {image.tobytes() for data in training_chunks(DIGITS) for image in decode_chunk(data)[0]}

    assert len(held_out) == manifest(DIGITS)["validationExampleCount"] == 2000
    assert not trained & {image.tobytes() for image in held_out}


# ---- ABI --------------------------------------------------------------------------------------


def test_module_needs_nothing_but_the_log(module: WasmModule) -> None:
    """The module imports at most covey.log and exports what ABI 1 asks for."""
    imports = {(each.module, each.name) for each in module.module.imports}
    exports = {each.name for each in module.module.exports}
    names = "abi alloc free configure weights initialize load begin step metrics predict error tensor"

    assert imports <= {("covey", "log")}
    assert exports == {"memory"} | {f"covey_{name}" for name in names.split()}
    assert module.call("abi") == 1


def test_weights_lie_in_manifest_order(module: WasmModule) -> None:
    """The manifest counts the module's weights; biases start at 0, weights within He's bounds."""
    weights = module.weights(weight_count(DIGITS))

    assert weights.size == WEIGHTS
    hidden, rest = weights[: PIXELS * 128], weights[PIXELS * 128 :]
    assert not rest[:128].any()
    assert not rest[-10:].any()
    assert abs(hidden).max() <= np.sqrt(6 / 784)
    assert abs(rest[128:-10]).max() <= np.sqrt(6 / 128)
    np.testing.assert_allclose(hidden.std(), np.sqrt(2 / 784), rtol=0.01)


def test_memory_is_aligned_and_given_back(module: WasmModule) -> None:
    """Allocations are multiples of 16, reuse what was freed, and are 0 beyond the host's limit."""
    first, second = module.call("alloc", 100), module.call("alloc", 1)
    assert first % 16 == second % 16 == 0
    assert first != second
    module.call("free", first, 100)

    assert module.call("alloc", 97) == first
    assert module.call("alloc", 1 << 30) == 0
    assert module.call("alloc", -1) == 0


def test_no_leak_over_many_loads(module: WasmModule) -> None:
    """Memory doesn't grow from the hundredth load to the thousandth of differing chunks."""
    memory: Any = module.memory
    data = [chunk(*[b"\3" + BLANK] * n) for n in (0, 5, 3, 11, 1)] + training_chunks(DIGITS)[:2]
    pages = []
    for turn in range(1000):
        units = module.load(data[turn % len(data)])
        module.check("begin", TRAIN, 0, units)
        if turn in (99, 999):
            pages.append(memory.size(module.store))

    assert pages[0] == pages[1]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"version": 2}, "version"),
        ({"batch": 0}, "batchSize"),
        ({"batch": 513}, "batchSize"),
        ({"epochs": 0}, "localEpochs"),
        ({"epochs": 101}, "localEpochs"),
        ({"rate": 0.0}, "learningRate"),
        ({"rate": float("nan")}, "learningRate"),
        ({"rate": float("inf")}, "learningRate"),
        ({"own": [1.0, 1.0]}, "momentum"),
        ({"own": [float("nan"), 1.0]}, "momentum"),
        ({"own": [0.9, 0.5]}, "shift"),
        ({"own": [0.9, -1.0]}, "shift"),
        ({"own": [0.9, 1e300]}, "shift"),
        ({"own": [0.9]}, "hyperparameters"),
        ({"own": [0.9, 1.0, 0.0]}, "hyperparameters"),
    ],
)
def test_configuration_out_of_bounds_is_refused(
    module: WasmModule, change: dict[str, Any], names: str
) -> None:
    """A value outside the manifest's bounds is named in the error, and no configuration is in force."""
    module.load(training_chunks(DIGITS)[0])
    arguments = {"own": OWN} | change
    with pytest.raises(ModuleError, match=names) as caught:
        module.configure(arguments.pop("own"), **arguments)

    assert caught.value.status == BAD_ARGUMENT
    assert module.call("begin", TRAIN, 0, 1) == BAD_STATE


def test_configuration_bounds_are_the_manifests(module: WasmModule) -> None:
    """The module takes each hyperparameter at the manifest's least and greatest value."""
    for extreme in ("min", "max"):
        values = {entry["name"]: entry[extreme] for entry in manifest(DIGITS)["hyperparameters"]}
        module.configure(
            [values["momentum"], values["shift"]],
            batch=values["batchSize"],
            rate=values["learningRate"],
            epochs=values["localEpochs"],
        )


@pytest.mark.parametrize("length", [0, 31, 32, 47])
def test_short_configuration_is_refused(module: WasmModule, length: int) -> None:
    """A configuration that ends early is an error, whatever it announces."""
    whole = struct.pack("<IIqdII2d", 1, 32, 1, 0.1, 1, 2, *OWN)
    with pytest.raises(ModuleError) as caught:
        module.give("configure", whole[:length])

    assert caught.value.status == BAD_ARGUMENT


def test_calls_out_of_turn_are_refused() -> None:
    """Stepping or beginning too early says what is missing instead of trapping."""
    fresh = WasmModule(DIGITS / "model.wasm")
    assert fresh.call("step") == BAD_STATE
    assert "covey_begin" in fresh.error()
    assert fresh.call("begin", TRAIN, 0, 0) == BAD_STATE
    assert "covey_configure" in fresh.error()
    fresh.configure(OWN)
    assert fresh.call("begin", TRAIN, 0, 0) == BAD_STATE

    assert "covey_load" in fresh.error()


@pytest.mark.parametrize(
    ("first", "units"),
    [(-1, 1), (0, 376), (375, 1), (376, 0), (1, -1), (1 << 40, 1), (-(1 << 63), 1), (0, 2**31 - 1)],
)
def test_units_out_of_range_are_refused(module: WasmModule, first: int, units: int) -> None:
    """Only units that are loaded can be worked on."""
    assert module.load(training_chunks(DIGITS)[0]) == 375

    assert module.call("begin", TRAIN, first, units) == BAD_ARGUMENT
    assert "375" in module.error()
    assert module.call("step") == BAD_STATE


@pytest.mark.parametrize("phase", [PLAY, UPDATE, 0, -1, 7])
def test_other_phases_are_unsupported(module: WasmModule, phase: int) -> None:
    """A dataset package trains and evaluates, and says so when asked for something else."""
    module.load(training_chunks(DIGITS)[0])

    assert module.call("begin", phase, 0, 1) == UNSUPPORTED


def test_steps_count_down_the_units(module: WasmModule) -> None:
    """Each step is one minibatch; the units left count every local epoch, and the last batch may be small."""
    module.configure(OWN, batch=150, epochs=2)
    module.load(training_chunks(DIGITS)[0])
    module.check("begin", TRAIN, 10, 350)

    assert [module.check("step") for _ in range(7)] == [550, 400, 350, 200, 50, 0, 0]
    assert module.view(module.call("metrics"), 4, "<f8")[[1, 3]].tolist() == [700, 700]


def test_nothing_measured_is_absent(module: WasmModule) -> None:
    """Without a unit, metrics have count 0 and the weights don't move."""
    before = module.weights(WEIGHTS)
    assert module.load(chunk()) == 0
    module.run(TRAIN, 0, 0)

    assert module.metrics(2) == [None, None]
    np.testing.assert_array_equal(module.weights(WEIGHTS), before)


def test_evaluation_changes_no_weight(module: WasmModule) -> None:
    """EVALUATE leaves the weights alone, and its result doesn't depend on the batch size."""
    units, before = module.load(training_chunks(DIGITS)[0]), module.weights(WEIGHTS)
    module.run(EVALUATE, 0, units)
    whole = module.metrics(2)
    module.configure(OWN, batch=7, epochs=5)
    module.run(EVALUATE, 0, units)

    assert module.metrics(2) == whole
    np.testing.assert_array_equal(module.weights(WEIGHTS), before)


def test_weights_that_are_not_finite_are_an_error(module: WasmModule) -> None:
    """Training and prediction refuse to go on with NaN, in words."""
    module.load(training_chunks(DIGITS)[0])
    module.set_weights(np.full(WEIGHTS, np.nan, np.float32))
    module.check("begin", TRAIN, 0, 10)

    assert module.call("step") == DIVERGED
    assert "learningRate" in module.error()
    with pytest.raises(ModuleError, match="finite"):
        module.predict(bytes(PIXELS), 40)


# ---- Prediction -------------------------------------------------------------------------------


def test_prediction_is_a_distribution(module: WasmModule) -> None:
    """Ten f32 that are probabilities, whatever the image."""
    for image in (bytes(PIXELS), b"\xff" * PIXELS, bytes(i % 256 for i in range(PIXELS))):
        probabilities = np.frombuffer(module.predict(image, 40), "<f4")

        assert (probabilities >= 0).all()
        np.testing.assert_allclose(probabilities.sum(), 1, atol=1e-6)


def test_prediction_checks_sizes(module: WasmModule) -> None:
    """An image of another size, or too little room for the answer, is an error with both numbers."""
    with pytest.raises(ModuleError, match=r"784 bytes, this one has 783"):
        module.predict(bytes(783), 40)
    with pytest.raises(ModuleError, match=r"need 40 bytes, there are 39"):
        module.predict(bytes(PIXELS), 39)


def test_prediction_leaves_training_alone(module: WasmModule) -> None:
    """A prediction between two steps doesn't change what the steps compute."""
    results = []
    for interrupt in (False, True):
        module.check("initialize", 1)
        module.check("begin", TRAIN, 0, module.load(training_chunks(DIGITS)[0]))
        while module.check("step"):
            if interrupt:
                module.predict(b"\x80" * PIXELS, 40)
        results.append(module.weights(WEIGHTS))

    np.testing.assert_array_equal(results[0], results[1])


# ---- Chunks -----------------------------------------------------------------------------------

IMAGE = (
    b"\7" + bytes((127,)) * 5 + bytes((132, 1, 2, 0, 4, 5, 127, 10))
)  # a label and 640 + 5 + 128 + 11 pixels


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "header has 20 bytes, this chunk has 0"),
        (chunk()[:19], "this chunk has 19"),
        (chunk(magic=b"DIGX"), "DIGS"),
        (chunk(version=2), "version 2, expected 1"),
        (chunk(rows=27), "27 x 28"),
        (chunk(count=1), "announces 1 images"),
        (chunk(IMAGE, count=2), "announces 2 images"),
        (chunk(IMAGE, IMAGE, IMAGE, count=2**32 - 1), "announces 4294967295 images"),
        (chunk(IMAGE, IMAGE, count=3), "image 2: the chunk ends before it"),
        (chunk(IMAGE, count=0), "14 bytes follow"),
        (chunk(IMAGE) + b"\0", "1 bytes follow"),
        (chunk(IMAGE[:-1]), "ends after 773 of 784"),
        (chunk(b"\x0a" + BLANK), "label 10"),
        (chunk(b"\xff" + BLANK), "label 255"),
        (chunk(b"\0" + bytes((127,)) * 7), "crosses its end"),
        (chunk(b"\0" + bytes((127,)) * 5 + b"\x7f\x90" + bytes(17)), "crosses its end"),
        (chunk(b"\0" + bytes((127,)) * 5 + b"\x7f\x8f" + bytes(15)), "ends within a run of 16"),
    ],
)
def test_broken_chunk_is_refused_in_words(module: WasmModule, data: bytes, says: str) -> None:
    """Each way in which a chunk can be wrong has its message; afterwards nothing is loaded."""
    module.load(training_chunks(DIGITS)[0])
    with pytest.raises(ModuleError) as caught:
        module.load(data)

    assert says in caught.value.message
    assert caught.value.status == BAD_DATA
    assert module.call("begin", TRAIN, 0, 0) == BAD_STATE


def test_every_truncation_is_refused(module: WasmModule) -> None:
    """A chunk cut at any byte is refused, and the whole one accepted."""
    whole = chunk(IMAGE, b"\3" + BLANK, IMAGE)
    for length in range(len(whole)):
        with pytest.raises(ModuleError):
            module.load(whole[:length])

    assert module.load(whole) == 3


def test_too_large_a_chunk_is_an_error(module: WasmModule) -> None:
    """A chunk whose images don't fit the host's memory limit is refused in words."""
    small = WasmModule(DIGITS / "model.wasm", 80)
    small.configure(OWN, batch=1)
    with pytest.raises(ModuleError, match="no memory for") as caught:
        small.load(chunk(*[b"\1" + (b"\xff" + b"\1" * 128) * 6 + b"\x8f" + b"\1" * 16] * 2000))

    assert caught.value.status == NO_MEMORY


@pytest.fixture(scope="module")
def shared_module() -> WasmModule:
    """One instance for all fuzzing: what one input leaves behind is part of what is tested."""
    made = WasmModule(DIGITS / "model.wasm", 1024)
    made.configure(OWN)
    made.check("initialize", 1)
    return made


RUN = st.one_of(
    st.integers(0, 127).map(lambda c: bytes((c,))),
    st.binary(min_size=1, max_size=128).map(lambda pixels: bytes((len(pixels) + 127,)) + pixels),
)
ALMOST_IMAGE = st.tuples(st.integers(0, 11), st.lists(RUN, max_size=12)).map(
    lambda it: bytes((it[0],)) + b"".join(it[1])
)
ALMOST_CHUNK = st.builds(
    lambda images, skew: chunk(*images, count=max(0, len(images) + skew)),
    st.lists(st.one_of(ALMOST_IMAGE, st.sampled_from([IMAGE, b"\3" + BLANK])), max_size=4),
    st.sampled_from([0, 0, 0, 1, -1, 2**31]),
)


@st.composite
def damaged_chunks(draw: st.DrawFn) -> bytes:
    """A valid chunk with some bytes changed, then cut or lengthened."""
    data = bytearray(training_chunks(DIGITS)[0][20:900])
    images = draw(st.integers(1, 3))
    data = (
        bytearray(chunk(*[IMAGE] * images)) if draw(st.booleans()) else bytearray(chunk(bytes(data), count=4))
    )
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    end = draw(st.integers(0, len(data)))
    return bytes(data[:end] if draw(st.booleans()) else data + draw(st.binary(max_size=8)))


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.one_of(st.binary(max_size=200), ALMOST_CHUNK, damaged_chunks()))
def test_loader_accepts_exactly_the_format(shared_module: WasmModule, data: bytes) -> None:
    """Whatever the bytes, the loader never traps, and takes exactly what the format's plain decoder takes."""
    module = shared_module
    try:
        expected = len(decode_chunk(data)[0])
    except (AssertionError, IndexError, struct.error):
        expected = -1
    try:
        units = module.load(data)
    except ModuleError as error:
        units = -1 if error.message else -2
    assert units == expected
    if units >= 0:
        module.run(EVALUATE, 0, units)
        assert module.metrics(2)[0] is None or units > 0


def test_defaults_follow_the_manifest() -> None:
    """Own hyperparameters are momentum and shift, in this order: the order in which configure reads them."""
    own, common = defaults(DIGITS)

    assert own == OWN
    assert common == {"batch": 16, "rate": 0.04, "epochs": 8}
