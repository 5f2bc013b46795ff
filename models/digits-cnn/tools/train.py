"""Trains digits-cnn on all of MNIST (or another IDX pair of its size) and judges it by all of its test file.

    python models/digits-cnn/tools/train.py FOLDER [--passes 4] [--seed 1]

FOLDER holds train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same of t10k. It is the training
of a job with the manifest's defaults, in one process: chunks of 500 images in an order drawn anew for each
pass, rounds of eight chunks from the same weights, averaged by their units. Needs the repository (the host
that its tests have for modules) and wasmtime. The same arguments give the same digest.
"""

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))

# The host and the converter are the repository's own.
from support.packages import DIGITS, defaults, load_script, manifest, weight_count
from support.wasm_harness import EVALUATE, TRAIN, WasmModule

PACKAGE = Path(__file__).resolve().parents[1]
CHUNK_SIZE = 500
ROUND = 8


def chunks_of(images: Path, labels: Path, size: int, seed: int) -> list[bytes]:
    """The images as digits-v1 chunks of `size`, each class evenly in all; 0: one chunk."""
    maker = load_script(DIGITS / "tools" / "make_chunks.py")
    (count, rows, columns), pixels = maker.read_idx(images, 3)
    _, classes = maker.read_idx(labels, 1)
    dealt = maker.deal(maker.draw(classes, count, seed), -(-count // size) if size else 1, seed)
    step = rows * columns
    return [
        maker.encode_chunk(rows, columns, [(classes[i], pixels[i * step : (i + 1) * step]) for i in hand])
        for hand in dealt
    ]


class Training:
    """A module, its weights, and the number of assignments that it has done."""

    def __init__(self, seed: int) -> None:
        self.module = WasmModule(PACKAGE / "model.wasm", manifest(PACKAGE)["limits"]["memoryPages"])
        self.own, self.common = defaults(PACKAGE)
        self.seed = seed
        self.assignments = 0
        self.count = weight_count(PACKAGE)
        self.module.configure(self.own, seed=seed, **self.common)
        self.module.check("initialize", seed)
        self.weights = self.module.weights(self.count)

    def train_round(self, chunks: list[bytes]) -> None:
        """One round: each chunk from the same weights, then their average by units, summed in f64."""
        total, units = np.zeros(self.count), 0
        for chunk in chunks:
            self.assignments += 1
            self.module.configure(self.own, seed=self.seed * 1_000_003 + self.assignments, **self.common)
            self.module.set_weights(self.weights)
            count = self.module.load(chunk)
            self.module.run(TRAIN, 0, count)
            total += count * (self.module.weights(self.count).astype(np.float64) - self.weights)
            units += count
        self.weights = (self.weights + total / units).astype(np.float32)

    def judge(self, chunk: bytes) -> tuple[float, float]:
        """Loss and accuracy on a chunk."""
        self.module.set_weights(self.weights)
        self.module.run(EVALUATE, 0, self.module.load(chunk))
        loss, accuracy = self.module.metrics(2)
        assert loss is not None
        assert accuracy is not None
        return loss, accuracy


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path, help="the four IDX files, gzipped")
    parser.add_argument("--passes", type=int, default=4, help="passes over all images (default 4)")
    parser.add_argument("--seed", type=int, default=1, help="weights, order and shifts (default 1)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    names = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    files = [folder / f"{name}-ubyte.gz" for name in names]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        print(f"train.py: {folder} lacks {', '.join(missing)}", file=sys.stderr)
        return 1
    chunks = chunks_of(files[0], files[1], CHUNK_SIZE, 1)
    (held_out,) = chunks_of(files[2], files[3], 0, 1)
    training, order = Training(arguments.seed), np.random.default_rng(arguments.seed)
    start, rows = time.process_time(), []
    for number in range(1, arguments.passes + 1):
        drawn = [chunks[i] for i in order.permutation(len(chunks))]
        for first in range(0, len(drawn), ROUND):
            training.train_round(drawn[first : first + ROUND])
        loss, accuracy = training.judge(held_out)
        rows.append({"pass": number, "loss": loss, "accuracy": accuracy})
        spent = time.process_time() - start
        print(
            f"pass {number}: loss {loss:.4f}, accuracy {accuracy:.4f}, {spent:.0f} s of one core", flush=True
        )
    digest = hashlib.sha256(training.weights.tobytes()).hexdigest()
    print(f"weights: sha256 {digest}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"passes": rows, "weights": digest}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
