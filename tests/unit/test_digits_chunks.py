"""models/digits/tools/make_chunks.py: IDX in, digits-v1 chunks out, nothing lost, nothing left to chance."""

import gzip
import hashlib
import json
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.digits_reference import PIXELS, decode_chunk, random_bits
from support.packages import DIGITS, load_script

SCRIPT = DIGITS / "tools" / "make_chunks.py"
make_chunks = load_script(SCRIPT)


@pytest.fixture
def idx(tmp_path: Path) -> tuple[Path, Path]:
    """100 images of random ink with labels 0 to 4, unevenly: the images gzipped, the labels not."""
    chooser = np.random.default_rng(5)
    pixels = chooser.integers(0, 256, (100, PIXELS), np.uint8) * (chooser.random((100, PIXELS)) < 0.2)
    labels = bytes(min(i % 7, 4) for i in range(100))
    images_path, labels_path = tmp_path / "images.gz", tmp_path / "labels"
    images_path.write_bytes(
        gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, 100, 28, 28) + pixels.astype(np.uint8).tobytes())
    )
    labels_path.write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 100) + labels)
    return images_path, labels_path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the tool as a person does."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


PIXEL_RUN = st.tuples(st.sampled_from([0, 0, 1, 10, 255]), st.integers(1, 300))


@settings(deadline=None)
@example(0, [])
@example(9, [(10, 783), (0, 1)])
@example(9, [(255, 129), (0, 1), (10, 1)])
@given(st.integers(0, 9), st.lists(PIXEL_RUN, max_size=40))
def test_encoding_loses_nothing(label: int, runs: list[tuple[int, int]]) -> None:
    """Any image comes back from its chunk byte for byte, with at most 7 control bytes besides its pixels."""
    pixels = b"".join(bytes((value,)) * length for value, length in runs)[:PIXELS].ljust(PIXELS, b"\0")
    chunk = make_chunks.encode_chunk(28, 28, [(label, pixels)])
    images, labels = decode_chunk(chunk)

    assert images[0].tobytes() == pixels
    assert labels.tolist() == [label]
    assert len(chunk) <= 20 + 1 + PIXELS + 7


def test_draws_are_splitmix64() -> None:
    """The tool draws by the same generator as the module."""
    assert [make_chunks.mix(77, i) for i in range(5)] == [random_bits(77, i) for i in range(5)]


def test_every_example_is_in_one_chunk(idx: tuple[Path, Path], tmp_path: Path) -> None:
    """Without a limit, chunks hold each of the file's examples once; their sizes differ by one at most."""
    images, labels = make_chunks.read_idx(idx[0], 3)[1], make_chunks.read_idx(idx[1], 1)[1]
    done = run(*idx, tmp_path / "out", "--chunks", 7)
    assert done.returncode == 0, done.stderr
    found: Counter[tuple[int, bytes]] = Counter()
    entries = json.loads((tmp_path / "out" / "dataset.json").read_text())
    for entry in entries:
        data = (tmp_path / "out" / "train" / entry["fileName"]).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        chunk_images, chunk_labels = decode_chunk(data)
        assert entry["exampleCount"] == len(chunk_labels)
        assert len(chunk_labels) in (14, 15)
        found.update(zip(chunk_labels.tolist(), map(bytes, chunk_images), strict=True))

    assert len(entries) == 7
    assert found == Counter((labels[i], images[i * PIXELS : (i + 1) * PIXELS]) for i in range(100))


def test_limit_keeps_the_classes_shares(idx: tuple[Path, Path], tmp_path: Path) -> None:
    """A limit draws each class's share, to within one; the same each time, others with another seed."""
    made = []
    for seed in (1, 1, 2):
        done = run(*idx, tmp_path / "one.bin", "--single", "--limit", 50, "--seed", seed)
        assert done.returncode == 0, done.stderr
        made.append((tmp_path / "one.bin").read_bytes())
    shares = np.bincount(decode_chunk(made[0])[1])
    whole = np.bincount(list(make_chunks.read_idx(idx[1], 1)[1]))

    assert shares.sum() == 50
    assert abs(shares - whole / 2).max() < 1
    assert made[0] == made[1] != made[2]


def test_chunk_size_sets_the_number(idx: tuple[Path, Path], tmp_path: Path) -> None:
    """--chunk-size is the most that a chunk holds, and chunks of an earlier run don't stay."""
    for size, chunks in ((10, 10), (30, 4)):
        assert run(*idx, tmp_path / "out", "--chunk-size", size).returncode == 0
        entries = json.loads((tmp_path / "out" / "dataset.json").read_text())

        assert len(entries) == chunks == len(list((tmp_path / "out" / "train").iterdir()))
        assert max(entry["exampleCount"] for entry in entries) <= size


def test_samples_are_images_of_the_file(idx: tuple[Path, Path], tmp_path: Path) -> None:
    """--samples writes a binary PGM for each digit there is: the first of its class in the first chunk."""
    assert run(*idx, tmp_path / "one.bin", "--single", "--samples", tmp_path / "s").returncode == 0
    images, labels = decode_chunk((tmp_path / "one.bin").read_bytes())

    assert {path.name for path in (tmp_path / "s").iterdir()} == {f"{n}.pgm" for n in make_chunks.NAMES[:5]}
    expected = images[labels.tolist().index(3)].tobytes()
    assert (tmp_path / "s" / "three.pgm").read_bytes() == b"P5\n28 28\n255\n" + expected


@pytest.mark.parametrize("name", make_chunks.NAMES)
def test_committed_samples_are_held_out(name: str) -> None:
    """Each sample is an image of the held-out file with the label of its name."""
    images, labels = decode_chunk((DIGITS / "validation.bin").read_bytes())
    pixels = (DIGITS / "samples" / f"{name}.pgm").read_bytes().removeprefix(b"P5\n28 28\n255\n")

    assert pixels in [bytes(image) for image in images[labels == make_chunks.NAMES.index(name)]]


def test_wrong_files_are_named(idx: tuple[Path, Path], tmp_path: Path) -> None:
    """Files that aren't IDX, are cut, or don't belong together end in status 1 and a sentence."""
    short = tmp_path / "short"
    short.write_bytes(idx[1].read_bytes()[:-1])
    other = tmp_path / "other"
    other.write_bytes(struct.pack(">4BI", 0, 0, 8, 1, 3) + bytes(3))
    cases = [
        ((idx[1], idx[1]), "with 3 dimensions"),
        ((idx[0], short), "needs 108 bytes, found 107"),
        ((idx[0], other), "100 images"),
        ((idx[0], tmp_path / "missing"), "missing"),
    ]
    for files, says in cases:
        done = run(*files, tmp_path / "out")

        assert done.returncode == 1
        assert says in done.stderr
        assert not (tmp_path / "out").exists()
