"""Compiles a package's module, checks what it imports and exports, and keeps the compiled code.

Compiled code is native code: loading it runs whatever it says. So only files that this user's process wrote
into its own 0700 folder are loaded, whole (their digest is checked), for this wasmtime version and these
settings.
"""

import contextlib
import hashlib
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import wasmtime

from covey_kit.errors import Reason
from covey_participant.domain.failure import WorkFailure

from . import abi

WASMTIME = version("wasmtime")
RUNTIME = f"wasmtime {WASMTIME}"

SETTINGS: Mapping[str, bool | str] = {
    # What isn't deterministic, or not wanted, is off; wasmtime has several of these on by default.
    "wasm_threads": False,
    "shared_memory": False,
    "wasm_relaxed_simd": False,
    "wasm_memory64": False,
    "wasm_multi_memory": False,
    "wasm_exceptions": False,
    "wasm_gc": False,
    "wasm_function_references": False,
    "wasm_tail_call": False,
    "wasm_wide_arithmetic": False,
    "wasm_custom_page_sizes": False,
    "wasm_stack_switching": False,
    "wasm_component_model": False,
    # What compilers to WebAssembly use.
    "wasm_simd": True,
    "wasm_bulk_memory": True,
    "wasm_multi_value": True,
    "wasm_reference_types": True,
    # Counting fuel or epochs in a tight loop costs up to half of the speed: endless steps are killed instead.
    "consume_fuel": False,
    "epoch_interruption": False,
    # The worker may not start threads once it is hardened.
    "parallel_compilation": False,
    "cranelift_opt_level": "speed",
}

_MAGIC = b"covey-compiled-1\n"


def engine() -> wasmtime.Engine:
    """Returns an engine with `SETTINGS`; a setting that this wasmtime doesn't have is an error."""
    config = wasmtime.Config()
    for name, value in SETTINGS.items():
        if not isinstance(getattr(wasmtime.Config, name, None), property):
            raise TypeError(f"wasmtime {WASMTIME} has no setting {name!r}")
        setattr(config, name, value)
    return wasmtime.Engine(config)


class CompiledFolder:
    """Compiled modules by (module digest, wasmtime version, settings); what can't be trusted isn't taken."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(folder.lstat(), folder)

    def path(self, digest: str) -> Path:
        """Returns where the compiled module of this digest lies."""
        settings = hashlib.sha256(repr(sorted(SETTINGS.items())).encode()).hexdigest()[:16]
        return self._folder / f"{digest}-{WASMTIME}-{settings}"

    def load(self, engine_: wasmtime.Engine, digest: str) -> wasmtime.Module | None:
        """Returns the compiled module, or None when there is none that is whole, ours and of this machine."""
        path = self.path(digest)
        try:
            content = _read_own(path)
        except (OSError, PermissionError):
            return None
        found, payload = content[len(_MAGIC) : len(_MAGIC) + 32], content[len(_MAGIC) + 32 :]
        if not content.startswith(_MAGIC) or hashlib.sha256(payload).digest() != found:
            path.unlink(missing_ok=True)
            return None
        try:
            return wasmtime.Module.deserialize(engine_, payload)
        except wasmtime.WasmtimeError:
            path.unlink(missing_ok=True)
            return None

    def store(self, digest: str, module: wasmtime.Module) -> None:
        """Keeps a compiled module: written aside, then renamed. A full disk costs the next compilation."""
        payload = bytes(module.serialize())
        with contextlib.suppress(OSError):
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(_MAGIC + hashlib.sha256(payload).digest() + payload)
                Path(name).replace(self.path(digest))
            except OSError:
                Path(name).unlink(missing_ok=True)


def _check_own(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & 0o077 or stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"{path} must belong to this user alone (mode 0700 or 0600)")


def _read_own(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        _check_own(os.fstat(file.fileno()), path)
        return file.read()


def compile_module(
    engine_: wasmtime.Engine, content: bytes, digest: str, folder: CompiledFolder | None
) -> wasmtime.Module:
    """Returns the compiled module, from the folder when it is there.

    Raises:
        WorkFailure: `MODULE_INVALID`: not WebAssembly, or of a kind that isn't offered.
    """
    module = folder.load(engine_, digest) if folder else None
    if module is not None:
        return module
    if not content.startswith(b"\0asm"):
        raise WorkFailure(Reason.MODULE_INVALID, "the module isn't WebAssembly: it doesn't begin with \\0asm")
    try:
        module = wasmtime.Module(engine_, content)
    except wasmtime.WasmtimeError as error:
        raise WorkFailure(Reason.MODULE_INVALID, f"the module can't be compiled: {error}") from error
    if folder:
        folder.store(digest, module)
    return module


@dataclass(frozen=True)
class InterfaceProblems:
    """What is wrong with a module's imports and exports; empty when nothing is.

    Attributes:
        wrong: imports that aren't offered, exports of a wrong type, one sentence each.
        missing: names of exports that it lacks.
    """

    wrong: list[str]
    missing: list[str]

    def sentences(self) -> list[str]:
        """Returns everything as sentences."""
        return [*self.wrong, *(f"export {name} is missing" for name in self.missing)]


def interface_problems(module: wasmtime.Module, required: Mapping[str, abi.Signature]) -> InterfaceProblems:
    """Compares imports and exports with ABI 1. `required`: functions that must be there."""
    wrong = [*_wrong_imports(module)]
    exports = {str(export.name): export.type for export in module.exports}
    missing = [name for name in ("memory", *required) if name not in exports]
    for name, signature in {**abi.OPTIONAL, **required}.items():
        if name in exports and _signature(exports[name]) != signature:
            wrong.append(f"export {name} must be {_show(signature)}, found {_describe(exports[name])}")
    if "memory" in exports and not isinstance(exports["memory"], wasmtime.MemoryType):
        wrong.append(f"export memory must be a memory, found {_describe(exports['memory'])}")
    return InterfaceProblems(wrong, missing)


def check_interface(module: wasmtime.Module, required: Mapping[str, abi.Signature]) -> None:
    """Raises unless imports and exports are those of ABI 1.

    Raises:
        WorkFailure: `MODULE_INVALID` names every import that isn't offered and every export of a wrong type;
            `MODULE_EXPORT_MISSING` names every export that is missing.
    """
    problems = interface_problems(module, required)
    if problems.wrong:
        raise WorkFailure(Reason.MODULE_INVALID, "; ".join(problems.sentences()))
    if problems.missing:
        lacking = ", ".join(problems.missing)
        raise WorkFailure(Reason.MODULE_EXPORT_MISSING, f"the module lacks exports: {lacking}")


def _wrong_imports(module: wasmtime.Module) -> list[str]:
    wrong = []
    for item in module.imports:
        offered = abi.IMPORTS.get((item.module, item.name or ""))
        if offered is None:
            wrong.append(f"import {item.module}.{item.name} isn't offered (only covey.log is)")
        elif _signature(item.type) != offered:
            wrong.append(f"import covey.log must be {_show(offered)}, found {_describe(item.type)}")
    return wrong


def _signature(kind: object) -> abi.Signature | None:
    if not isinstance(kind, wasmtime.FuncType):
        return None
    return tuple(str(t) for t in kind.params), tuple(str(t) for t in kind.results)


def _show(signature: abi.Signature) -> str:
    parameters, results = signature
    return f"({', '.join(parameters)}) -> ({', '.join(results)})"


def _describe(kind: object) -> str:
    signature = _signature(kind)
    return _show(signature) if signature else type(kind).__name__.removesuffix("Type").lower()
