"""How fast the module of models/cartpole plays and learns, against the same algorithm in NumPy and Gymnasium.

    python benchmarks/experience.py [--repeat 5] [--json FILE]

One thread each: the module in wasmtime, called a step at a time as a participant does; and PPO as CleanRL
writes it, with arrays of NumPy (its BLAS held to one thread) for the networks and Gymnasium's environments:
one, eight side by side, and Gymnasium's own CartPole in NumPy arrays. Same networks, same weights (of a
policy that balances for some 200 steps), same minibatches. Runs alternate, and the best of each counts.
Seconds are the process's own processor time, so that neighbours on the machine count less; compare ratios.

    play      steps of the environment a second, the policy's choice of each action included
    update    samples of the optimizer a second: 4 passes in minibatches of 64, advantages included
    both      steps of the environment a second, each played once and learnt from in 4 passes
"""

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

# The host and the reference are the tests' own.
from support.experience_harness import ExperienceModule, Mesh
from support.experience_packages import PACKAGES
from support.experience_reference import (
    Array,
    Episode,
    Policy,
    Settings,
    decode,
    log_softmax,
    prepare,
    update,
)
from support.wasm_harness import PLAY, UPDATE

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
CARTPOLE = PACKAGES["cartpole"].path
SETTINGS = Settings(64, 0.002, 4, 0.99, 0.98, 0.2, 0.0, 0.5, 0.5, 0.05)
UNITS = 32


@dataclass(frozen=True)
class Row:
    """One comparison; rates are per second."""

    work: str
    against: str
    module: float
    numpy: float


def seconds(work: Callable[[], object]) -> float:
    """Processor time of one call: both sides have one thread."""
    start = time.process_time()
    work()
    return time.process_time() - start


def best(repeat: int, *works: Callable[[], object]) -> list[float]:
    """The least seconds of each, taken in turns after one turn to warm up."""
    times = [[seconds(work) for work in works] for _ in range(repeat + 1)][1:]
    return [min(column) for column in zip(*times, strict=True)]


def balancing() -> ExperienceModule:
    """A module whose policy was trained for six rounds."""
    module = ExperienceModule(CARTPOLE)
    module.check("initialize", 1)
    mesh = Mesh(module, assignments=8, units=16)
    for _ in range(6):
        mesh.round()
    return module


class Rollout:
    """PPO's collection of experience as CleanRL has it: `steps` steps of a vector of environments."""

    def __init__(self, environments: Any, flat: Array, policy: Policy, steps: int) -> None:
        self._environments, self._flat, self._policy, self._steps = environments, flat, policy, steps
        self._random = np.random.default_rng(1)
        self._seen, _ = environments.reset(seed=1)

    def __call__(self) -> None:
        """Plays, and keeps what learning needs."""
        count = self._environments.num_envs
        kept = np.zeros((self._steps, count, 4), np.float32)
        actions = np.zeros((self._steps, count), np.int64)
        logs, values, rewards, ends = (np.zeros((self._steps, count), np.float32) for _ in range(4))
        for t in range(self._steps):
            kept[t] = self._seen
            chances = log_softmax(self._policy.forward(self._flat, self._seen, "actor")[2])
            values[t] = self._policy.values(self._flat, self._seen)
            drawn = self._random.random(count)[:, None]
            actions[t] = (drawn >= np.exp(chances).cumsum(axis=1)[:, :-1]).sum(axis=1)
            logs[t] = np.take_along_axis(chances, actions[t][:, None], 1)[:, 0]
            self._seen, rewards[t], terminated, truncated, _ = self._environments.step(actions[t])
            ends[t] = terminated | truncated


def environments() -> dict[str, tuple[Any, int]]:
    """Vectors of environments by name, each with the steps of a rollout."""
    sync = gymnasium.vector.SyncVectorEnv
    arrays = gymnasium.VectorizeMode.VECTOR_ENTRY_POINT

    def wide(count: int) -> Any:
        return gymnasium.make_vec("CartPole-v1", num_envs=count, vectorization_mode=arrays)

    return {
        "Gymnasium, one environment": (sync([lambda: gymnasium.make("CartPole-v1")]), 1024),
        "Gymnasium, 8 side by side": (sync([lambda: gymnasium.make("CartPole-v1")] * 8), 256),
        "Gymnasium's arrays, 8 wide": (wide(8), 512),
        "Gymnasium's arrays, 64 wide": (wide(64), 256),
    }


class Sides:
    """Both sides with the same weights, and a record to learn from."""

    def __init__(self) -> None:
        self.module = balancing()
        self.weights = self.module.all_weights()
        self.record = self.module.play(0, UNITS)
        self.episodes: list[Episode] = decode(self.record, 16)
        self.samples = sum(len(episode.actions) for episode in self.episodes)
        self.policy = Policy.of(CARTPOLE)

    def play(self) -> None:
        """The module plays."""
        self.module.set_weights(self.weights)
        self.module.run(PLAY, 0, UNITS)

    def learn(self) -> None:
        """The module loads the record and learns from it."""
        self.module.set_weights(self.weights)
        self.module.load_experience(self.record)
        self.module.run(UPDATE, 0, UNITS)

    def learn_numpy(self) -> None:
        """NumPy learns from it."""
        flat, random = self.weights.copy(), np.random.default_rng(1)
        batch = prepare(self.policy, flat, self.episodes, SETTINGS)
        orders = [random.permutation(self.samples) for _ in range(SETTINGS.epochs)]
        update(self.policy, flat, batch, SETTINGS, orders)


def measure(repeat: int) -> list[Row]:
    """All comparisons."""
    sides, rows = Sides(), []
    learnt = best(repeat, sides.learn, sides.learn_numpy)
    per_update = [time_ / sides.samples for time_ in learnt]
    rows.append(Row("update", "NumPy", *(SETTINGS.epochs / each for each in per_update)))
    for name, (vector, steps) in environments().items():
        rollout = Rollout(vector, sides.weights, sides.policy, steps)
        played = best(repeat, sides.play, rollout)
        per_step = (played[0] / sides.samples, played[1] / (steps * vector.num_envs))
        rows.append(Row("play", name, *(1 / each for each in per_step)))
        both = [1 / (step + sample) for step, sample in zip(per_step, per_update, strict=True)]
        rows.append(Row("both", name, *both))
        vector.close()
    return rows


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("--repeat", type=int, default=5, help="runs of each side (default 5)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    if not ONE_THREAD.items() <= os.environ.items():
        # NumPy's BLAS read these when it was imported: begin again with them set.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ONE_THREAD)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("wasmtime", "numpy", "gymnasium")
    )
    setting = f"{versions}, {platform.machine()}, {os.cpu_count()} cores"
    print(f"{setting}; one thread each, best of {arguments.repeat}\n")
    print("| work | against | module, a second | NumPy, a second | module / NumPy |")
    print("|---|---|---|---|---|")
    rows = measure(arguments.repeat)
    for row in rows:
        ratio = row.module / row.numpy
        print(
            f"| {row.work} | {row.against} | {row.module:,.0f} | {row.numpy:,.0f} | {ratio:.1f} |", flush=True
        )
    if arguments.json:
        figures = {"setting": setting, "repeat": arguments.repeat, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
