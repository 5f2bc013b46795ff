"""A host for one package module, as small as ABI 1 allows, for tests and kernel benchmarks."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import wasmtime

TRAIN, EVALUATE, PLAY, UPDATE, STREAM_TRAIN, STREAM_EVALUATE = 1, 2, 3, 4, 5, 6


class ModuleError(Exception):
    """A negative status; the message is the module's own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (status {status})")
        self.status = status
        self.message = message


class WasmModule:
    """One instance of a package module. Not thread-safe; the memory limit is in pages of 64 KiB."""

    def __init__(self, path: Path, memory_pages: int = 4096) -> None:
        config = wasmtime.Config()
        config.wasm_relaxed_simd = False
        config.wasm_threads = False
        engine = wasmtime.Engine(config)
        self.store = wasmtime.Store(engine)
        self.store.set_limits(memory_size=memory_pages * 65536)
        self.module = wasmtime.Module.from_file(engine, str(path))
        linker = wasmtime.Linker(engine)
        i32 = wasmtime.ValType.i32()
        linker.define_func("covey", "log", wasmtime.FuncType([i32, i32, i32], []), lambda *_: None)
        self._exports = linker.instantiate(self.store, self.module).exports(self.store)
        self.memory = self._exports["memory"]

    def call(self, name: str, *arguments: int) -> int:
        """Calls `covey_<name>` and returns what it returned (0 for nothing), unchecked."""
        function: Any = self._exports[f"covey_{name}"]
        return int(function(self.store, *arguments) or 0)

    def check(self, name: str, *arguments: int) -> int:
        """The same for functions that return a status: negative ones raise `ModuleError`."""
        status = self.call(name, *arguments)
        if status < 0:
            raise ModuleError(status, self.error())
        return status

    def view(self, pointer: int, count: int, dtype: str) -> np.ndarray[Any, Any]:
        """`count` elements of memory in place: only until the next call, which may move the memory."""
        memory: Any = self.memory
        size = count * np.dtype(dtype).itemsize
        return np.frombuffer(memory.get_buffer_ptr(self.store, size, pointer), dtype=dtype, count=count)

    def error(self) -> str:
        """The text of `covey_error`."""
        memory: Any = self.memory
        start = self.call("error")
        return bytes(memory.read(self.store, start, start + 1024)).split(b"\0")[0].decode()

    def put(self, data: bytes) -> int:
        """Copies bytes into memory of the module's allocator and returns where they lie."""
        memory: Any = self.memory
        pointer = self.call("alloc", len(data))
        if pointer == 0:
            raise ModuleError(0, f"covey_alloc({len(data)}) gave nothing")
        memory.write(self.store, data, pointer)
        return pointer

    def give(self, name: str, data: bytes) -> int:
        """Calls a status function that takes (pointer, length) with these bytes."""
        pointer = self.put(data)
        try:
            return self.check(name, pointer, len(data))
        finally:
            self.call("free", pointer, len(data))

    def configure(
        self,
        own: list[float],
        *,
        seed: int = 1,
        batch: int = 32,
        rate: float = 0.1,
        epochs: int = 1,
        version: int = 1,
    ) -> None:
        """Sends a configuration; `own` are the model's own hyperparameters in manifest order."""
        head = struct.pack("<IIqdII", version, batch, seed, rate, epochs, len(own))
        self.give("configure", head + struct.pack(f"<{len(own)}d", *own))

    def load(self, chunk: bytes) -> int:
        """Loads a chunk; returns its units."""
        return self.give("load", chunk)

    def weights(self, count: int) -> np.ndarray[Any, Any]:
        """A copy of the weights."""
        return self.view(self.call("weights"), count, "<f4").copy()

    def set_weights(self, values: np.ndarray[Any, Any]) -> None:
        """Writes the weights in place."""
        self.view(self.call("weights"), values.size, "<f4")[:] = values

    def tensor(self, index: int, dtype: str) -> np.ndarray[Any, Any]:
        """What `covey_tensor` hands out, in place: only until the next call."""
        span = self.call("tensor", index)
        if span == 0:
            raise ModuleError(0, f"covey_tensor({index}) gave nothing")
        pointer, elements = (int(word) for word in self.view(span, 2, "<u4"))
        return self.view(pointer, elements, dtype)

    def metrics(self, count: int) -> list[float | None]:
        """Means of `count` metrics; None where nothing was counted."""
        pairs = self.view(self.call("metrics"), 2 * count, "<f8").reshape(count, 2)
        return [float(total / over) if over else None for total, over in pairs]

    def run(self, phase: int, first: int, units: int) -> None:
        """Begins a phase and steps it to its end."""
        self.check("begin", phase, first, units)
        while self.check("step"):
            pass

    def predict(self, data: bytes, capacity: int) -> bytes:
        """One inference: the bytes of the outputs."""
        memory: Any = self.memory
        source, target = self.put(data), self.call("alloc", capacity)
        try:
            written = self.check("predict", source, len(data), target, capacity)
            return bytes(memory.read(self.store, target, target + written))
        finally:
            self.call("free", source, len(data))
            self.call("free", target, capacity)
