"""Turns IDX files (MNIST and its relatives, gzipped or not) into digits-v1 chunks and their dataset manifest.

    python make_chunks.py train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz OUT --chunks 32 --limit 12000

writes OUT/dataset.json and OUT/train/*.bin. With --single OUT is one chunk file and there is no manifest.
What is chosen depends on the files, the seed and the numbers given, on nothing else.
"""

import argparse
import gzip
import hashlib
import json
import re
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

MAGIC = b"DIGS"
VERSION = 1
FORMAT = "digits-v1"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Runs of one blank pixel stay inside the pixels around them: that costs a byte less.
RUNS = re.compile(rb"\x00\x00+|\x00\Z|(?:[^\x00]|\x00(?!\x00|\Z))+", re.DOTALL)
MASK = (1 << 64) - 1


class InputError(Exception):
    """The files or the arguments don't fit together; the message says how."""


def read_idx(path: Path, dimensions: int) -> tuple[tuple[int, ...], bytes]:
    """Reads an IDX file of bytes: its shape and its data. Gzip is recognised by its first two bytes."""
    raw = path.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        raw = gzip.decompress(raw)
    head = 4 + 4 * dimensions
    if len(raw) < head or raw[:4] != bytes((0, 0, 8, dimensions)):
        raise InputError(f"{path}: expected an IDX file of bytes with {dimensions} dimensions")
    shape = struct.unpack(f">{dimensions}I", raw[4:head])
    size = 1
    for extent in shape:
        size *= extent
    if len(raw) != head + size:
        raise InputError(f"{path}: shape {shape} needs {head + size} bytes, found {len(raw)}")
    return shape, raw[head:]


def encode_image(label: int, pixels: bytes) -> bytes:
    """One image of a chunk: its label, then runs of blank pixels and runs of pixels as they are."""
    parts = [bytes((label,))]
    for match in RUNS.finditer(pixels):
        run = match.group()
        for start in range(0, len(run), 128):
            piece = run[start : start + 128]
            blank = not any(piece)
            parts.append(bytes((len(piece) - 1,)) if blank else bytes((len(piece) + 127,)) + piece)
    return b"".join(parts)


def encode_chunk(rows: int, columns: int, examples: Sequence[tuple[int, bytes]]) -> bytes:
    """A whole chunk of (label, pixels)."""
    head = MAGIC + struct.pack("<4I", VERSION, rows, columns, len(examples))
    return head + b"".join(encode_image(label, pixels) for label, pixels in examples)


def mix(seed: int, index: int) -> int:
    """SplitMix64's index-th output from `seed`: the key by which examples are drawn."""
    z = (seed + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def draw(labels: bytes, limit: int, seed: int) -> list[list[int]]:
    """`limit` examples, each class with its share of the file: for each class its indices in drawn order."""
    classes = max(labels) + 1 if labels else 0
    drawn: list[list[int]] = [[] for _ in range(classes)]
    for index in sorted(range(len(labels)), key=lambda i: (mix(seed, i), i)):
        drawn[labels[index]].append(index)
    exact = [len(members) * limit / len(labels) for members in drawn]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(classes), key=lambda c: (shares[c] - exact[c], c))
    for c in by_remainder[: limit - sum(shares)]:
        shares[c] += 1
    return [members[:share] for members, share in zip(drawn, shares, strict=True)]


def deal(drawn: list[list[int]], chunks: int, seed: int) -> list[list[int]]:
    """Deals class by class: chunks differ by one at most in size and in each class. Then mixes each."""
    dealt: list[list[int]] = [[] for _ in range(chunks)]
    for position, index in enumerate(index for members in drawn for index in members):
        dealt[position % chunks].append(index)
    for hand in dealt:
        hand.sort(key=lambda i: (mix(seed + 1, i), i))
    return dealt


def write_dataset(out: Path, chunks: list[bytes], counts: list[int]) -> None:
    """Writes the chunks into OUT/train and OUT/dataset.json beside it."""
    folder = out / "train"
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("train-*.bin"):
        stale.unlink()
    entries = []
    for number, (data, count) in enumerate(zip(chunks, counts, strict=True)):
        name = f"train-{number:04}"
        (folder / f"{name}.bin").write_bytes(data)
        entries.append(
            {
                "id": name,
                "fileName": f"{name}.bin",
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "format": FORMAT,
                "exampleCount": count,
            }
        )
    lines = ",\n".join("  " + json.dumps(entry) for entry in entries)
    (out / "dataset.json").write_text(f"[\n{lines}\n]\n")


def write_samples(folder: Path, rows: int, columns: int, examples: Sequence[tuple[int, bytes]]) -> None:
    """Writes the first example of each class as a binary PGM named after its digit."""
    folder.mkdir(parents=True, exist_ok=True)
    for label, name in enumerate(NAMES):
        pixels = next((pixels for found, pixels in examples if found == label), None)
        if pixels is not None:
            (folder / f"{name}.pgm").write_bytes(f"P5\n{columns} {rows}\n255\n".encode() + pixels)


def convert(arguments: argparse.Namespace) -> str:
    """Does what the command line asks for and says what was written."""
    (count, rows, columns), pixels = read_idx(arguments.images, 3)
    (label_count,), labels = read_idx(arguments.labels, 1)
    if count != label_count:
        raise InputError(f"{count} images in {arguments.images}, {label_count} labels in {arguments.labels}")
    limit = min(arguments.limit or count, count)
    if arguments.single:
        chunks = 1
    elif arguments.chunk_size:
        chunks = max(1, -(-limit // arguments.chunk_size))
    else:
        chunks = arguments.chunks
    dealt = deal(draw(labels, limit, arguments.seed), chunks, arguments.seed)
    size = rows * columns
    hands = [[(labels[i], pixels[i * size : (i + 1) * size]) for i in hand] for hand in dealt]
    encoded = [encode_chunk(rows, columns, hand) for hand in hands]
    if arguments.single:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_bytes(encoded[0])
    else:
        write_dataset(arguments.out, encoded, [len(hand) for hand in hands])
    if arguments.samples:
        write_samples(arguments.samples, rows, columns, hands[0])
    return f"{arguments.out}: {limit} examples in {chunks} chunk(s), {sum(map(len, encoded)):,} bytes"


def main() -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("images", type=Path, help="IDX file of images (3 dimensions), may be gzipped")
    parser.add_argument("labels", type=Path, help="IDX file of labels (1 dimension), may be gzipped")
    parser.add_argument("out", type=Path, help="folder for dataset.json and train/; with --single the file")
    many = parser.add_mutually_exclusive_group()
    many.add_argument("--chunks", type=int, default=32, help="number of chunks (default 32)")
    many.add_argument("--chunk-size", type=int, help="examples of a chunk, instead of their number")
    many.add_argument("--single", action="store_true", help="one chunk file, without a manifest")
    parser.add_argument("--limit", type=int, help="examples in all, drawn class by class (default: all)")
    parser.add_argument("--seed", type=int, default=1, help="draws and mixes the examples (default 1)")
    parser.add_argument("--samples", type=Path, help="folder for one PGM of each digit, from the first chunk")
    arguments = parser.parse_args()
    if min(arguments.chunks, arguments.chunk_size or 1, arguments.limit or 1) < 1:
        parser.error("--chunks, --chunk-size and --limit are at least 1")
    try:
        print(convert(arguments))
    except (InputError, OSError) as error:
        print(f"make_chunks: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
