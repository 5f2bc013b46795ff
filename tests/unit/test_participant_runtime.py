"""The runtime's parts in this process: settings that take effect, compiled code, frames, the ABI's layout."""

import struct
from dataclasses import asdict
from pathlib import Path

import pytest
import wasmtime
from hypothesis import given
from hypothesis import strategies as st

from covey_kit.errors import Reason
from covey_participant.domain.failure import WorkFailure
from covey_participant.runtime import abi, protocol
from covey_participant.runtime import module as modules
from covey_participant.runtime.module import CompiledFolder, check_interface, compile_module, engine
from covey_participant.runtime.protocol import Job, Outcome, Progress, ProtocolError, Step, Task
from support.wat_packages import wasm
from support.worker_jobs import Bench

REFUSED = {
    "threads": "(module (memory 1 1 shared))",
    "relaxed SIMD": "(module (func (param v128 v128 v128) (result v128)"
    " (f32x4.relaxed_madd (local.get 0) (local.get 1) (local.get 2))))",
    "memory64": "(module (memory i64 1))",
    "several memories": "(module (memory 1) (memory 1))",
    "exceptions": "(module (tag $t) (func (throw $t)))",
    "garbage collection": "(module (type (struct)))",
    "function references": "(module (type $f (func)) (func (param (ref $f)) (call_ref $f (local.get 0))))",
    "tail calls": "(module (func $f (return_call $f)))",
    "wide arithmetic": "(module (func (param i64 i64 i64 i64) (result i64 i64)"
    " (i64.add128 (local.get 0) (local.get 1) (local.get 2) (local.get 3))))",
    "page sizes": "(module (memory 1 (pagesize 1)))",
    "components": "(component)",
}

OFFERED = {
    "SIMD": "(module (func (param v128) (result v128) (f32x4.add (local.get 0) (local.get 0))))",
    "bulk memory": "(module (memory 1) (func (memory.fill (i32.const 0) (i32.const 0) (i32.const 1))))",
    "several values": "(module (func (result i32 i32) (i32.const 1) (i32.const 2)))",
    "reference types": "(module (table 1 externref) (func (param externref)))",
    "sign extension": "(module (func (param i32) (result i32) (i32.extend8_s (local.get 0))))",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_isnt_deterministic_or_wanted_is_switched_off(name: str) -> None:
    """The setting took effect: a module that uses it doesn't compile, though the assembler knows it."""
    content = bytes(wasmtime.wat2wasm(REFUSED[name]))

    with pytest.raises(WorkFailure) as caught:
        compile_module(engine(), content, "x", None)
    assert caught.value.reason is Reason.MODULE_INVALID


@pytest.mark.parametrize("name", OFFERED)
def test_what_compilers_use_is_there(name: str) -> None:
    """Such modules compile."""
    assert compile_module(engine(), bytes(wasmtime.wat2wasm(OFFERED[name])), "x", None) is not None


def test_a_mistyped_setting_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """wasmtime-py itself would take any name."""
    monkeypatch.setattr(modules, "SETTINGS", {"wasm_treads": False})

    with pytest.raises(TypeError, match="wasm_treads"):
        engine()


# --- compiled code ----------------------------------------------------------------------------


def kept(folder: Path) -> tuple[CompiledFolder, Path, wasmtime.Engine]:
    """A folder with a compiled adder, its file, and the engine."""
    made, engine_ = CompiledFolder(folder), engine()
    compile_module(engine_, wasm(), "adder", made)
    return made, made.path("adder"), engine_


def test_compiled_code_is_kept_and_taken(tmp_path: Path) -> None:
    """Private to its owner, and loaded instead of compiling."""
    folder, path, engine_ = kept(tmp_path / "compiled")

    assert path.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "compiled").stat().st_mode & 0o777 == 0o700
    assert folder.load(engine_, "adder") is not None
    # With the kept code the content isn't even looked at.
    assert compile_module(engine_, b"", "adder", folder) is not None
    assert modules.WASMTIME in path.name


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "foreign"])
def test_damaged_compiled_code_is_never_loaded(tmp_path: Path, damage: str) -> None:
    """It is removed, and compiled anew."""
    folder, path, engine_ = kept(tmp_path / "compiled")
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
    damaged = {"flip": content, "cut": content[:-1], "empty": bytearray(), "foreign": bytearray(b"\x7fELF")}
    path.write_bytes(damaged[damage])

    assert folder.load(engine_, "adder") is None
    assert not path.exists()
    assert compile_module(engine_, wasm(), "adder", folder) is not None
    assert folder.load(engine_, "adder") is not None


def test_compiled_code_of_others_is_never_loaded(tmp_path: Path) -> None:
    """A file that others may write, a link, and a folder that others may enter are refused."""
    folder, path, engine_ = kept(tmp_path / "compiled")
    path.chmod(0o622)
    assert folder.load(engine_, "adder") is None
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert folder.load(engine_, "adder") is None

    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(PermissionError):
        CompiledFolder(tmp_path / "open")


# --- interface --------------------------------------------------------------------------------


def test_every_missing_export_is_named() -> None:
    """All of them, `memory` too, in one error."""
    module = compile_module(engine(), bytes(wasmtime.wat2wasm("(module)")), "x", None)
    required = abi.required_exports(dataset=True, work=True, inference=True, experience=True)

    with pytest.raises(WorkFailure) as caught:
        check_interface(module, required)
    assert caught.value.reason is Reason.MODULE_EXPORT_MISSING
    for name in ("memory", *required):
        assert name in caught.value.message
    assert len(required) == 14


def test_only_what_capabilities_need_is_required() -> None:
    """A module without inference needs no covey_predict."""
    required = abi.required_exports(dataset=True, work=True, inference=False, experience=False)

    assert "covey_predict" not in required
    assert "covey_experience" not in required
    assert "covey_load" in required


def test_a_configuration_has_the_layout_of_the_abi() -> None:
    """Offsets 0, 4, 8, 16, 24, 28 and 32, little-endian."""
    content = abi.encode_config(
        seed=-2, batch_size=3, learning_rate=0.5, local_epochs=4, hyperparameters=[1.5, -1.0]
    )

    assert len(content) == 48
    assert struct.unpack_from("<I", content, 0) == (1,)
    assert struct.unpack_from("<I", content, 4) == (3,)
    assert struct.unpack_from("<q", content, 8) == (-2,)
    assert struct.unpack_from("<d", content, 16) == (0.5,)
    assert struct.unpack_from("<II", content, 24) == (4, 2)
    assert struct.unpack_from("<2d", content, 32) == (1.5, -1.0)


# --- frames -----------------------------------------------------------------------------------


def roundtrip(frame: dict[str, object]) -> dict[str, object]:
    """A frame as the other side sees it."""
    content = protocol.encode(frame)
    (size,) = protocol.HEADER.unpack(content[:4])
    assert size == len(content) - 4
    return protocol.decode(content[4:])


def test_jobs_and_events_survive_the_wire(tmp_path: Path) -> None:
    """What is sent is what arrives."""
    bench = Bench(tmp_path)
    bench.prepare()
    job = bench.train()
    outcome = Outcome(1, 2, [(1.5, 2.0)], "ab", 8, 0.25, 65536, ["x"])
    progress = Progress(Step.WORK, 5, 10, 0.5, playing=True)

    assert Job.decode(roundtrip(job.encode())) == job
    assert protocol.parse_event(roundtrip(outcome.encode())) == outcome
    assert protocol.parse_event(roundtrip(progress.encode())) == progress
    with pytest.raises(WorkFailure) as caught:
        protocol.parse_event(roundtrip(protocol.failure_frame(WorkFailure(Reason.MODULE_TRAP, "words"))))
    assert (caught.value.reason, caught.value.message) == (Reason.MODULE_TRAP, "words")
    assert asdict(job)["task"] is Task.TRAIN


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"type": 1}',
        b"\xff",
        b"[" * 10000,
        b'{"type": "done", "metrics": [[1]]}',
        b'{"type": "progress", "step": "sleep"}',
        b'{"type": "failed", "reason": "MOOD", "message": ""}',
    ],
)
def test_frames_of_another_shape_are_refused(body: bytes) -> None:
    """Never taken for something else, never another exception."""
    with pytest.raises(ProtocolError):
        protocol.parse_event(protocol.decode(body))


@given(st.dictionaries(st.text(max_size=8), st.none() | st.integers() | st.text(max_size=5), max_size=5))
def test_no_frame_of_a_worker_breaks_the_parent(frame: dict[str, object]) -> None:
    """Whatever a worker sends is an event, a failure, or a ProtocolError."""
    for kind in ("progress", "done", "log", "failed", "other"):
        try:
            protocol.parse_event({**frame, "type": kind})
        except (ProtocolError, WorkFailure):
            continue
