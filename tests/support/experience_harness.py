"""A host for experience packages: plays, learns, evaluates, and runs federated rounds in one process."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from support.packages import defaults, manifest, weight_count
from support.wasm_harness import EVALUATE, PLAY, UPDATE, WasmModule

Array = np.ndarray[Any, Any]


class ExperienceModule(WasmModule):
    """An instance of an experience package, with its manifest's defaults and its auxiliary weights."""

    def __init__(
        self,
        package: Path,
        changes: Mapping[str, float] | None = None,
        *,
        auxiliary: bool = True,
        pages: int | None = None,
    ) -> None:
        super().__init__(package / "model.wasm", pages or manifest(package)["limits"]["memoryPages"])
        self.package = package
        self.count = weight_count(package)
        self.names = [entry["name"] for entry in manifest(package)["metrics"]]
        if auxiliary:
            for index, entry in enumerate(manifest(package).get("auxiliaryWeights", [])):
                self.load_auxiliary(index, (package / entry["fileName"]).read_bytes())
        self.setting(**(changes or {}))

    def setting(self, **changes: float) -> None:
        """Configures with the manifest's defaults and seed 1 but for `changes`, named as in the manifest."""
        seed = int(changes.pop("seed", 1))
        own, common = defaults(self.package)
        names = [entry["name"] for entry in manifest(self.package)["hyperparameters"]][3:]
        own = [float(changes.pop(name, value)) for name, value in zip(names, own, strict=True)]
        batch = int(changes.pop("batchSize", common["batch"]))
        rate = changes.pop("learningRate", common["rate"])
        epochs = int(changes.pop("localEpochs", common["epochs"]))
        assert not changes, f"no such hyperparameters: {changes}"
        self.configure(own, seed=seed, batch=batch, rate=rate, epochs=epochs)

    def load_auxiliary(self, index: int, data: bytes) -> None:
        """Hands over an auxiliary file, by its place in the manifest."""
        pointer = self.put(data)
        try:
            self.check("load_auxiliary", index, pointer, len(data))
        finally:
            self.call("free", pointer, len(data))

    def record(self) -> bytes:
        """A copy of what the last PLAY recorded."""
        memory: Any = self.memory
        span = self.put(bytes(8))
        self.check("experience", span)
        start, length = self.view(span, 2, "<u4").tolist()
        self.call("free", span, 8)
        return bytes(memory.read(self.store, start, start + length))

    def play(self, first: int, units: int) -> bytes:
        """Plays units and returns their record."""
        self.run(PLAY, first, units)
        return self.record()

    def load_experience(self, record: bytes) -> int:
        """Loads a record; returns its units."""
        return self.give("load_experience", record)

    def update(self, record: bytes, first: int) -> dict[str, float | None]:
        """Learns from a record that begins with unit `first`; returns the metrics."""
        self.run(UPDATE, first, self.load_experience(record))
        return self.named_metrics()

    def evaluate(self, units: int | None = None, first: int = 0) -> dict[str, float | None]:
        """Plays evaluation units (all that the manifest has, if none are given); returns the metrics."""
        wanted = manifest(self.package)["workSource"]["evaluationUnits"] if units is None else units
        self.run(EVALUATE, first, wanted)
        return self.named_metrics()

    def named_metrics(self) -> dict[str, float | None]:
        """Means by name; None where nothing was counted."""
        return dict(zip(self.names, self.metrics(len(self.names)), strict=True))

    def all_weights(self) -> Array:
        """A copy of the weights."""
        return self.weights(self.count)


@dataclass
class Mesh:
    """Federated averaging with one module playing every participant: a job but for its seeds.

    Attributes:
        module: an instance; its one seed is the sequence's and that of every update.
        assignments, units: of a round; units of one assignment.
    """

    module: ExperienceModule
    assignments: int = 8
    units: int = 32
    next_unit: int = 0
    steps: int = 0
    weights: Array = field(init=False)

    def __post_init__(self) -> None:
        """Begins with the weights of round 0."""
        self.weights = self.module.all_weights()

    def round(self) -> dict[str, float]:
        """One round; returns the means of the assignments' metrics."""
        total = np.zeros(self.weights.size)
        found: list[dict[str, float | None]] = []
        for _ in range(self.assignments):
            self.module.set_weights(self.weights)
            record = self.module.play(self.next_unit, self.units)
            found.append(self.module.update(record, self.next_unit))
            total += self.units * (self.module.all_weights() - self.weights).astype(np.float64)
            self.next_unit += self.units
        self.weights = (self.weights + total / (self.units * self.assignments)).astype(np.float32)
        self.module.set_weights(self.weights)
        means = {name: [m[name] for m in found] for name in found[0]}
        return {name: float(np.mean([v for v in all_ if v is not None])) for name, all_ in means.items()}
