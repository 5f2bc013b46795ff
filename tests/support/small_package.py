"""A small package and dataset on disk whose every declaration can be made wrong."""

import hashlib
import json
from pathlib import Path
from typing import Any


def declare(path: Path) -> dict[str, Any]:
    """Returns what a manifest says of a file."""
    content = path.read_bytes()
    return {"fileName": path.name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def write_package(folder: Path, **changes: Any) -> dict[str, Any]:
    """Writes a valid package (its module isn't one: nothing here runs it) and returns its manifest.

    `changes` replace top-level keys; a value of None takes the key out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.wasm").write_bytes(b"\0asm\1\0\0\0")
    (folder / "validation.bin").write_bytes(b"held out")
    (folder / "extra.bin").write_bytes(b"auxiliary weights")
    manifest: dict[str, Any] = {
        "format": "weei-model-package",
        "formatVersion": 1,
        "name": "small",
        "version": "1.0.0",
        "description": "A package of the tests.",
        "license": "Apache-2.0",
        "module": declare(folder / "model.wasm"),
        "parameters": [{"name": "w", "shape": [2, 3]}, {"name": "b", "shape": []}],
        "dataFormats": ["small-v1"],
        "workSource": {"kind": "DATASET", "inputs": "dataset", "unit": "example"},
        "capabilities": {"training": True, "evaluation": True, "inference": True},
        "metrics": [{"name": "loss", "label": "Loss", "direction": "MINIMIZE", "unit": ""}],
        "hyperparameters": [
            {"name": "learningRate", "label": "Rate", "default": 0.1, "min": 0.0, "max": 1.0},
        ],
        "backends": [{"kind": "CPU_WASM"}],
        "validation": declare(folder / "validation.bin"),
        "auxiliaryWeights": [{"name": "base", **declare(folder / "extra.bin")}],
    }
    manifest |= changes
    manifest = {key: value for key, value in manifest.items() if value is not None}
    save(folder, manifest)
    return manifest


def save(folder: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest as it is."""
    (folder / "manifest.json").write_text(json.dumps(manifest), "utf-8")


def write_dataset(folder: Path, chunks: int = 2) -> list[dict[str, Any]]:
    """Writes a valid dataset with its files in `train/` and returns its manifest."""
    (folder / "train").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(chunks):
        path = folder / "train" / f"chunk-{number}.bin"
        path.write_bytes(b"chunk %d" % number)
        rows.append({"id": path.stem, **declare(path), "format": "small-v1", "exampleCount": 5})
    (folder / "dataset.json").write_text(json.dumps(rows), "utf-8")
    return rows
