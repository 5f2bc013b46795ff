"""How packages are built: reproducibly, and with helpers in C that do what they say."""

import importlib.metadata
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.packages import DIGITS, MODELS, load_script
from support.wasm_harness import WasmModule

PROBE = """
#define COVEY_SUPPORT_IMPLEMENTATION
#include "covey_support.h"
#include "covey_math.h"
#include "covey_random.h"

COVEY_EXPORT(covey_exp) void covey_exp(float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) x[i] = covey_expf(x[i]);
}
COVEY_EXPORT(covey_ln) void covey_ln(float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) x[i] = covey_logf(x[i]);
}
COVEY_EXPORT(covey_bits) void covey_bits(uint64_t *x, uint32_t n, int64_t key) {
    for (uint32_t i = 0; i < n; i++) x[i] = covey_random_bits((uint64_t)key, i);
}
COVEY_EXPORT(covey_below) void covey_below(uint32_t *x, uint32_t n, uint32_t bound) {
    for (uint32_t i = 0; i < n; i++) x[i] = covey_random_below(covey_random_key(5, 6), i, bound);
}
COVEY_EXPORT(covey_unit) void covey_unit(float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) x[i] = covey_random_float(covey_random_key(5, 7), i);
}
COVEY_EXPORT(covey_move) void covey_move(char *to, char *from, uint32_t n) { memmove(to, from, n); }
COVEY_EXPORT(covey_compare) int32_t covey_compare(char *a, char *b, uint32_t n) { return memcmp(a, b, n); }
COVEY_EXPORT(covey_words) void covey_words(int32_t value) {
    covey_fail(COVEY_BAD_DATA, "%u %d %s %% %x %", (uint32_t)value, value, "text");
}
COVEY_EXPORT(covey_long_words) void covey_long_words(void) {
    const char *eighty = "01234567890123456789012345678901234567890123456789012345678901234567890123456789";
    covey_fail(COVEY_BAD_DATA, "%s%s%s%s", eighty, eighty, eighty, eighty);
}
"""


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """models/build.py; skips where the pinned compiler isn't installed."""
    script = load_script(MODELS / "build.py")
    try:
        found = importlib.metadata.version("ziglang")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != script.ZIG_VERSION:
        pytest.skip(f"needs ziglang {script.ZIG_VERSION}, which compiles the packages; found {found}")
    return script


@pytest.fixture(scope="module")
def probe_file(build: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module that exports the helpers in models/include."""
    folder = tmp_path_factory.mktemp("probe")
    (folder / "src").mkdir()
    (folder / "src" / "probe.c").write_text(PROBE)
    build.compile_module(folder, folder / "model.wasm")
    return folder / "model.wasm"


@pytest.fixture(scope="module")
def probe(probe_file: Path) -> WasmModule:
    """An instance of it with room for large arrays."""
    return WasmModule(probe_file, 64)


@pytest.fixture(scope="module")
def heap(probe_file: Path) -> WasmModule:
    """An instance with so little memory that 60 examples that lose what they free don't fit."""
    return WasmModule(probe_file, 8)


def through(probe: WasmModule, name: str, values: np.ndarray[Any, Any], *more: int) -> np.ndarray[Any, Any]:
    """What an exported function makes of an array in place."""
    pointer = probe.put(values.tobytes())
    probe.call(name, pointer, values.size, *more)
    result = probe.view(pointer, values.size, values.dtype.str).copy()
    probe.call("free", pointer, values.nbytes)
    return result


# ---- Building ---------------------------------------------------------------------------------


def run_build(models: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a copy of models/build.py as `make models` does."""
    command = [sys.executable, str(models / "build.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)


@pytest.fixture
def copied(build: ModuleType, tmp_path: Path) -> Path:
    """The build script, the headers and `digits` (without its data) in a folder of another name."""
    models = tmp_path / "somewhere else" / "models"
    shutil.copytree(MODELS / "include", models / "include")
    shutil.copytree(DIGITS, models / "digits", ignore=shutil.ignore_patterns("data"))
    shutil.copy(MODELS / "build.py", models / "build.py")
    return models


def test_packages_are_what_their_sources_compile_to(build: ModuleType) -> None:
    """Every committed module and manifest is byte for byte what a rebuild makes."""
    done = run_build(MODELS, "--check")

    assert done.returncode == 0, done.stderr


def test_build_does_not_depend_on_the_folder(copied: Path) -> None:
    """Built elsewhere, the module and the manifest have the same bytes."""
    (copied / "digits" / "model.wasm").unlink()
    done = run_build(copied, "digits")

    assert done.returncode == 0, done.stderr
    for name in ("model.wasm", "manifest.json"):
        assert (copied / "digits" / name).read_bytes() == (DIGITS / name).read_bytes()


def test_check_names_what_differs(copied: Path) -> None:
    """A module that isn't its sources' and a wrong digest are both named, and nothing is changed."""
    source = copied / "digits" / "src" / "digits.c"
    source.write_text(source.read_text().replace("#define EPOCHS_MOST 100u", "#define EPOCHS_MOST 99u"))
    (copied / "digits" / "validation.bin").write_bytes(b"other")
    before = (copied / "digits" / "manifest.json").read_bytes()
    done = run_build(copied, "--check")

    assert done.returncode == 1
    assert "model.wasm isn't what the sources compile to" in done.stderr
    assert "manifest.json doesn't have the sizes and digests" in done.stderr
    assert (copied / "digits" / "manifest.json").read_bytes() == before


def test_build_reports_the_compilers_words(copied: Path) -> None:
    """A source that doesn't compile fails with the compiler's message and leaves the old module."""
    (copied / "digits" / "src" / "chunk.c").write_text("int broken(void) { return nothing; }\n")
    done = run_build(copied)

    assert done.returncode == 1
    assert "undeclared identifier 'nothing'" in done.stderr
    assert (copied / "digits" / "model.wasm").read_bytes() == (DIGITS / "model.wasm").read_bytes()


def test_unknown_package_is_named(copied: Path) -> None:
    """Asking for a package that isn't there says which there are."""
    done = run_build(copied, "digitz")

    assert done.returncode == 1
    assert "no package digitz" in done.stderr
    assert "there are: digits" in done.stderr


def test_manifest_is_rendered_as_it_is_committed(build: ModuleType) -> None:
    """Rendering keeps every value and the committed formatting."""
    text = (DIGITS / "manifest.json").read_text()

    assert build.render(json.loads(text)) == text


# ---- Helpers ----------------------------------------------------------------------------------


def spread(low: float, high: float) -> np.ndarray[Any, Any]:
    """A hundred thousand f32 between two bounds."""
    return np.linspace(low, high, 100_001).astype(np.float32)


def units_in_last_place(found: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> float:
    """The greatest distance in units of the exact value's last f32 place."""
    return float((np.abs(found - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_expf_is_accurate(probe: WasmModule) -> None:
    """covey_expf is within 2 units in the last place over all results that are normal numbers."""
    x = np.concatenate([spread(-87.33, 88.72), spread(-1, 1), spread(-1e-4, 1e-4)])

    assert units_in_last_place(through(probe, "exp", x), np.exp(x.astype(np.float64))) < 2


def test_expf_at_the_ends(probe: WasmModule) -> None:
    """e^x is 1 at 0, 0 far below, infinite far above, and NaN stays NaN."""
    x = np.array([0, -0.0, -87.34, -1e30, -np.inf, 88.73, np.inf, np.nan], np.float32)

    expected = np.array([1, 1, 0, 0, 0, np.inf, np.inf, np.nan], np.float32)

    np.testing.assert_array_equal(through(probe, "exp", x), expected)


def test_logf_is_accurate(probe: WasmModule) -> None:
    """covey_logf is within 2 units in the last place, from the least denormal to the greatest number."""
    wide = np.geomspace(1.2e-38, 3.4e38, 50_001, dtype=np.float32)
    x = np.concatenate([spread(0.01, 4), wide, np.array([1e-45, 1e-40, 1e-39], np.float32)])
    x = x[x != 1]

    assert units_in_last_place(through(probe, "ln", x), np.log(x.astype(np.float64))) < 2


def test_logf_at_the_ends(probe: WasmModule) -> None:
    """The logarithm is 0 at 1, minus infinity at 0, NaN below, infinite at infinity."""
    x = np.array([1, 0, -0.0, -1, np.inf, -np.inf, np.nan], np.float32)
    expected = np.array([0, -np.inf, -np.inf, np.nan, np.inf, np.nan, np.nan], np.float32)

    np.testing.assert_array_equal(through(probe, "ln", x), expected)


def test_random_numbers_are_splitmix64(probe: WasmModule) -> None:
    """The numbers of a key are the published outputs of splitmix64.c for that state."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]

    assert through(probe, "bits", np.zeros(4, np.uint64), 1234567).tolist() == published


def test_random_numbers_are_uniform(probe: WasmModule) -> None:
    """Bounded integers hit every value about equally often; floats fill [0, 1) evenly."""
    counts = np.bincount(through(probe, "below", np.zeros(70_000, np.uint32), 7), minlength=7)
    floats = through(probe, "unit", np.zeros(70_000, np.float32))
    histogram = np.histogram(floats, bins=10, range=(0, 1))[0]

    assert counts.size == 7
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 22.5  # chi-squared, 6 degrees, p = 0.001
    assert ((histogram - 7_000) ** 2 / 7_000).sum() < 27.9  # 9 degrees
    assert 0 <= floats.min() <= floats.max() < 1


def test_memory_functions(probe: WasmModule) -> None:
    """Overlapping ranges are copied right both ways; memcmp orders bytes as unsigned."""
    memory: Any = probe.memory
    pointer = probe.put(bytes(range(32)))
    probe.call("move", pointer + 3, pointer, 20)
    assert memory.read(probe.store, pointer, pointer + 32) == bytes([0, 1, 2, *range(20), *range(23, 32)])
    probe.call("move", pointer, pointer + 3, 20)
    assert memory.read(probe.store, pointer, pointer + 20) == bytes(range(20))
    left, right = probe.put(b"ab\x7f"), probe.put(b"ab\x80")

    assert probe.call("compare", left, right, 3) < 0 < probe.call("compare", right, left, 3)
    assert probe.call("compare", left, right, 2) == 0


def test_error_texts(probe: WasmModule) -> None:
    """covey_fail formats numbers and strings, passes on what it doesn't know, and cuts what is too long."""
    probe.call("words", -12)
    assert probe.error() == "4294967284 -12 text % x %"
    probe.call("words", -(2**31))
    assert probe.error().startswith("2147483648 -2147483648 ")
    probe.call("long_words")

    assert probe.error() == ("0123456789" * 32)[:255]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 3000)), max_size=60))
def test_allocations_never_overlap(heap: WasmModule, actions: list[tuple[bool, int]]) -> None:
    """Whatever is taken and freed: blocks are aligned, apart from each other, and keep what was written."""
    memory: Any = heap.memory
    held: dict[int, bytes] = {}
    for number, (take, size) in enumerate(actions):
        if take or not held:
            pointer = heap.call("alloc", size)
            assert pointer % 16 == 0 < pointer
            held[pointer] = struct.pack("<I", number) * (size // 4)
            memory.write(heap.store, held[pointer], pointer)
            held[pointer] += bytes(size % 4)
            memory.write(heap.store, held[pointer], pointer)
        else:
            pointer = list(held)[size % len(held)]
            assert memory.read(heap.store, pointer, pointer + len(held[pointer])) == held[pointer]
            heap.call("free", pointer, len(held.pop(pointer)))
    for pointer, content in held.items():
        assert memory.read(heap.store, pointer, pointer + len(content)) == content
        heap.call("free", pointer, len(content))
