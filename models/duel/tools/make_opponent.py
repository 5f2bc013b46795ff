"""Trains the opponent of models/duel and writes it as the auxiliary file that the manifest names.

    python models/duel/tools/make_opponent.py [--output FILE] [--rounds 16]

The opponent is the package's own policy after 16 rounds of federated averaging (8 assignments of 16 games)
against an opponent whose weights are all 0, which moves at random. It takes half a minute, and the same
sources give the same bytes. The file is f32, little-endian: a policy's weights in manifest order, so that the
weights of any checkpoint of this package can be an opponent too.
"""

import argparse
import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tests"))

# The host is the tests' own.
from support.experience_harness import ExperienceModule, Mesh

PACKAGE = Path(__file__).resolve().parent.parent
SEED = 101
ASSIGNMENTS, GAMES = 8, 16
# Said here, so that other defaults in the manifest leave the opponent as it is.
SETTINGS = {
    "batchSize": 64,
    "learningRate": 0.002,
    "localEpochs": 4,
    "discount": 0.99,
    "trace": 0.98,
    "clip": 0.2,
    "entropyWeight": 0.01,
    "valueWeight": 0.5,
    "gradientNorm": 0.5,
}


def train(rounds: int) -> bytes:
    """The weights after so many rounds."""
    module = ExperienceModule(PACKAGE, SETTINGS | {"seed": SEED}, auxiliary=False)
    module.load_auxiliary(0, bytes(4 * module.count))
    module.check("initialize", SEED)
    mesh = Mesh(module, ASSIGNMENTS, GAMES)
    for number in range(1, rounds + 1):
        print(f"round {number}: {mesh.round()['return']:+.2f} points a game", flush=True)
    return mesh.weights.astype("<f4").tobytes()


def main() -> None:
    """Writes the file and says what it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument(
        "--output", type=Path, default=PACKAGE / "opponent.bin", help="default: the package's own"
    )
    parser.add_argument("--rounds", type=int, default=16, help="rounds of training (default 16)")
    arguments = parser.parse_args()
    made = train(arguments.rounds)
    arguments.output.write_bytes(made)
    print(f"{arguments.output}: {len(made):,} bytes, sha256 {hashlib.sha256(made).hexdigest()}")


if __name__ == "__main__":
    main()
