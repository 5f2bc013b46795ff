"""Where the model packages are, and what tests read from them."""

import functools
import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"
DIGITS = MODELS / "digits"
OWN_FIELDS = ("batchSize", "learningRate", "localEpochs")


def load_script(path: Path) -> ModuleType:
    """Imports a script that belongs to no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def manifest(package: Path) -> dict[str, Any]:
    """The package's manifest as JSON."""
    loaded: dict[str, Any] = json.loads((package / "manifest.json").read_text())
    return loaded


def weight_count(package: Path) -> int:
    """Weights in all: the sum of the products of the parameters' shapes."""
    total = 0
    for parameter in manifest(package)["parameters"]:
        size = 1
        for extent in parameter["shape"]:
            size *= extent
        total += size
    return total


def defaults(package: Path) -> tuple[list[float], dict[str, Any]]:
    """The manifest's defaults: the model's own hyperparameters, and keywords of `WasmModule.configure`."""
    values = {entry["name"]: entry["default"] for entry in manifest(package)["hyperparameters"]}
    own = [float(value) for name, value in values.items() if name not in OWN_FIELDS]
    batch, rate, epochs = (values[name] for name in OWN_FIELDS)
    return own, {"batch": batch, "rate": rate, "epochs": epochs}


@functools.cache
def training_chunks(package: Path) -> list[bytes]:
    """The package's training chunks, in manifest order."""
    entries = json.loads((package / "data" / "dataset.json").read_text())
    return [(package / "data" / "train" / entry["fileName"]).read_bytes() for entry in entries]
