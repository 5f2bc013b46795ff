"""One instance of a module behind ABI 1: every pointer that it hands out is checked before it is followed."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import wasmtime

from covey_kit.errors import Reason
from covey_participant.domain.failure import WorkFailure, bounded

from . import abi

F32Array = np.ndarray[Any, np.dtype[np.float32]]
Log = Callable[[str, str], None]

LOG_LINE_BYTES = 1024
LOG_LINES = 100
ERROR_BYTES = 2048


class Instance:
    """A fresh instance: memory, globals and tables as the module declares them.

    Each method makes one call into the module and raises `WorkFailure` when it traps (`MODULE_TRAP`), returns
    a negative status (`MODULE_STATUS`, quoting the module), hands out a pointer outside of its memory
    (`MODULE_INVALID`), or runs out of memory (`MEMORY_LIMIT`).
    """

    def __init__(
        self, engine: wasmtime.Engine, module: wasmtime.Module, *, memory_bytes: int, log: Log
    ) -> None:
        self._log = log
        self._lines = 0
        self._limit = memory_bytes
        self._store = wasmtime.Store(engine)
        self._store.set_limits(
            memory_size=memory_bytes, memories=1, tables=16, table_elements=1 << 20, instances=1
        )
        self._memory: wasmtime.Memory | None = None
        with self._trapping("the start function"):
            made = wasmtime.Instance(self._store, module, [self._import(item) for item in module.imports])
        exports = made.exports(self._store)
        memory = exports["memory"]
        assert isinstance(memory, wasmtime.Memory), "check_interface comes first"
        self._memory = memory
        self._first_bytes = memory.data_len(self._store)
        self._functions = {
            name: function
            for name in {**abi.CORE, **abi.OPTIONAL}
            if isinstance(function := exports.get(name), wasmtime.Func)
        }

    # --- the calls ----------------------------------------------------------------------------

    def check_abi(self) -> None:
        """Raises `MODULE_INVALID` unless the module was written for ABI 1."""
        found = self._call("covey_abi")
        if found != abi.VERSION:
            raise WorkFailure(
                Reason.MODULE_INVALID, f"covey_abi() is {found}, this host offers ABI {abi.VERSION}"
            )

    def configure(self, config: bytes) -> None:
        """Hands over the configuration (`abi.encode_config`)."""
        with self._buffer(config) as pointer:
            self._status("covey_configure", pointer, len(config))

    def initialize(self, seed: int) -> None:
        """Has the module make the weights of round 0."""
        self._status("covey_initialize", seed)

    def load(self, chunk: "bytes | memoryview[int]", *, experience: bool = False) -> int:
        """Hands over a chunk (or a record of experience) and returns its units."""
        with self._buffer(chunk) as pointer:
            return self._status("covey_load_experience" if experience else "covey_load", pointer, len(chunk))

    def begin(self, phase: abi.Phase, first: int, units: int) -> None:
        """Starts work on the units [first, first + units)."""
        self._status("covey_begin", int(phase), first, units)

    def step(self) -> int:
        """Does a slice of the work and returns the units of work left; 0: done."""
        return self._status("covey_step")

    def weights(self, count: int) -> F32Array:
        """Returns the weights in place: a view that is valid until the next call into the module."""
        pointer = self._call("covey_weights") & 0xFFFFFFFF
        if pointer % 4:
            raise WorkFailure(
                Reason.MODULE_INVALID, f"covey_weights() is {pointer}, which isn't a multiple of 4"
            )
        return np.frombuffer(self._view("covey_weights", pointer, 4 * count), np.float32)

    def metrics(self, count: int) -> list[tuple[float, float]]:
        """Returns (sum, count) of each metric in manifest order."""
        pointer = self._call("covey_metrics") & 0xFFFFFFFF
        values = np.frombuffer(self._view("covey_metrics", pointer, 16 * count), np.uint8).copy().view("<f8")
        return [(float(values[2 * i]), float(values[2 * i + 1])) for i in range(count)]

    def experience(self) -> bytes:
        """Returns a copy of what PLAY recorded."""
        with self._buffer(bytes(8)) as span:
            self._status("covey_experience", span)
            pointer, length = np.frombuffer(self._view("covey_experience", span, 8), np.uint32).tolist()
            return bytes(self._view("covey_experience", pointer, length))

    def predict(self, data: bytes, capacity: int) -> bytes:
        """Runs one inference and returns what it wrote, at most `capacity` bytes."""
        with self._buffer(data) as source, self._buffer(bytes(capacity)) as target:
            written = self._status("covey_predict", source, len(data), target, capacity)
            if written > capacity:
                raise WorkFailure(
                    Reason.MODULE_INVALID,
                    f"covey_predict() says that it wrote {written} bytes into a buffer of {capacity}",
                )
            return bytes(self._view("covey_predict", target, written))

    @property
    def memory_bytes(self) -> int:
        """Bytes of linear memory now."""
        return self._memory.data_len(self._store) if self._memory else 0

    def close(self) -> None:
        """Gives the memory back at once. No view of it may be used afterwards."""
        self._store.close()

    # --- calling ------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: int) -> int:
        with self._trapping(f"{name}()"):
            result = self._functions[name](self._store, *arguments)
        return int(result) if result is not None else 0

    def _status(self, name: str, *arguments: int) -> int:
        status = self._call(name, *arguments)
        if status >= 0:
            return status
        words = self._error_text()
        message = (
            f"{name}() returned {status}: {words}" if words else f"{name}() returned {status} without a word"
        )
        if status == abi.NO_MEMORY:
            raise WorkFailure(Reason.MEMORY_LIMIT, f"{message} (memory: {self._use()})")
        raise WorkFailure(Reason.MODULE_STATUS, message)

    @contextlib.contextmanager
    def _trapping(self, where: str) -> Iterator[None]:
        try:
            yield
        except wasmtime.Trap as trap:
            code = trap.trap_code.name if trap.trap_code else "host"
            lines = [line.strip() for line in trap.message.splitlines() if line.strip()]
            message = f"{where} trapped: {code} ({'; '.join(lines[:6])})"
            if self._memory and self._first_bytes < self.memory_bytes > self._limit - self._limit // 16:
                raise WorkFailure(Reason.MEMORY_LIMIT, f"{message}; memory: {self._use()}") from trap
            raise WorkFailure(Reason.MODULE_TRAP, message) from trap
        except wasmtime.WasmtimeError as error:
            reason = (
                Reason.MEMORY_LIMIT
                if "memory" in str(error) and "limit" in str(error)
                else Reason.MODULE_INVALID
            )
            raise WorkFailure(
                reason, f"{where} can't run: {error} (memory limit: {self._limit} bytes)"
            ) from error

    def _use(self) -> str:
        return f"{self.memory_bytes} of {self._limit} bytes in use"

    def _error_text(self) -> str:
        """Returns the module's own words about its last error; empty when it has none that can be read."""
        try:
            pointer = self._call("covey_error") & 0xFFFFFFFF
            room = self.memory_bytes - pointer
            if pointer == 0 or room <= 0:
                return ""
            raw = bytes(self._view("covey_error", pointer, min(room, ERROR_BYTES)))
        except WorkFailure:
            return ""
        return raw.split(b"\0", 1)[0].decode("utf-8", "replace")

    # --- memory -------------------------------------------------------------------------------

    def _view(self, name: str, pointer: int, size: int) -> "memoryview[int]":
        """Returns bytes of the module's memory in place, after checking that they lie in it."""
        assert self._memory is not None
        room = self.memory_bytes
        if pointer + size > room:
            raise WorkFailure(
                Reason.MODULE_INVALID,
                f"{name}() points outside of memory: {size} bytes at {pointer}, the memory has {room}",
            )
        if size == 0:
            return memoryview(b"")
        return memoryview(self._memory.get_buffer_ptr(self._store, size, pointer)).cast("B")

    @contextlib.contextmanager
    def _buffer(self, content: "bytes | memoryview[int]") -> Iterator[int]:
        """Puts bytes into memory that the module allocates, and frees it unless the call failed."""
        size = len(content)
        pointer = self._call("covey_alloc", size) & 0xFFFFFFFF
        if pointer == 0:
            raise WorkFailure(
                Reason.MEMORY_LIMIT,
                f"covey_alloc({size}) returned 0: no memory (memory: {self._use()})",
            )
        if pointer % abi.ALIGNMENT:
            raise WorkFailure(
                Reason.MODULE_INVALID,
                f"covey_alloc({size}) is {pointer}, which isn't a multiple of {abi.ALIGNMENT}",
            )
        target = self._view("covey_alloc", pointer, size)
        if size:
            target[:] = content
        yield pointer
        self._call("covey_free", pointer, size)

    # --- the import ---------------------------------------------------------------------------

    def _import(self, item: wasmtime.ImportType) -> wasmtime.Func:
        kind = item.type
        assert isinstance(kind, wasmtime.FuncType), "check_interface comes first"
        return wasmtime.Func(self._store, kind, self._take_line)

    def _take_line(self, level: int, pointer: int, length: int) -> None:
        """`covey.log`: bounded in length and number; what lies outside of memory is dropped, not followed."""
        self._lines += 1
        if self._lines > LOG_LINES or self._memory is None:
            return
        pointer, size = pointer & 0xFFFFFFFF, min(length & 0xFFFFFFFF, LOG_LINE_BYTES)
        if pointer + size > self.memory_bytes:
            return
        text = bytes(self._view("covey.log", pointer, size)).decode("utf-8", "replace")
        name = abi.LOG_LEVELS[level] if 0 <= level < len(abi.LOG_LEVELS) else "info"
        if self._lines == LOG_LINES:
            text = f"{text} (no further lines of this instance are shown)"
        self._log(name, bounded(text, LOG_LINE_BYTES))
