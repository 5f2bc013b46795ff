"""Jobs for worker processes, made of the packages in WebAssembly text."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from covey_participant.runtime.abi import PAGE
from covey_participant.runtime.protocol import ChunkFile, ConfigSpec, FileRange, Job, ModuleSpec, Task
from support.wat_packages import chunk_bytes, wasm

UNITS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
BASE = np.arange(8, dtype=np.float32)


@dataclass(frozen=True)
class Bench:
    """A folder with base weights and a chunk, from which jobs are made."""

    folder: Path

    def prepare(self) -> None:
        """Writes the files."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "base").write_bytes(b"head" + BASE.tobytes())
        (self.folder / "chunk").write_bytes(chunk_bytes(list(UNITS)))

    def module(self, variant: str, *, memory_pages: int = 64, content: bytes | None = None) -> ModuleSpec:
        """A module of the adder's family."""
        content = wasm(variant) if content is None else content
        path = self.folder / f"{variant}.wasm"
        if not path.exists():
            path.write_bytes(content)
        return ModuleSpec(
            path=str(path),
            sha256=hashlib.sha256(content).hexdigest(),
            compiled=str(self.folder / "compiled"),
            memory_bytes=memory_pages * PAGE,
            weights=BASE.size,
            metrics=2,
        )

    def initialize(self, variant: str = "adder", **config: Any) -> Job:
        """Makes initial weights."""
        return Job(
            Task.INITIALIZE, self.module(variant), ConfigSpec(**config), output=str(self.folder / "out")
        )

    def train(self, variant: str = "adder", **config: Any) -> Job:
        """Trains on the chunk from the base weights."""
        return Job(
            Task.TRAIN,
            self.module(variant),
            ConfigSpec(**{"batch_size": 4, "learning_rate": 0.5, **config}),
            weights=FileRange(str(self.folder / "base"), 4, BASE.nbytes),
            weights_sha256=hashlib.sha256(BASE.tobytes()).hexdigest(),
            chunks=[ChunkFile(str(self.folder / "chunk"), len(UNITS))],
            output=str(self.folder / "out"),
        )

    def output(self) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """What the last job wrote."""
        return np.fromfile(self.folder / "out", np.float32)
