"""What the experience packages are held to: their records, networks and learning in plain NumPy.

Written from the descriptions in models/include, with matrix products instead of the module's loops. In f64 it
is the truth for derivatives; in f32 it is what the benchmark runs.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from support.digits_reference import random_below, random_bits, random_key
from support.packages import manifest

Array = np.ndarray[Any, Any]
Observe = Callable[[bytes], Array]

HEADER = struct.Struct("<IIqII")
MAGIC = 0x31505045
TERMINATED, TRUNCATED = 1, 2
STREAM_UNITS, STREAM_UPDATE = 16, 17
EVALUATION_SEED = 0x6576616C75617465
MASK = (1 << 64) - 1


# ---- Random numbers ---------------------------------------------------------------------------


def unit_key(seed: int, unit: int) -> int:
    """The key of the episode of a unit."""
    return random_key(random_key(seed, STREAM_UNITS), unit)


def random_float(key: int, index: int) -> float:
    """Uniform in [0, 1), a multiple of 2^-24."""
    return (random_bits(key, index) >> 40) * 2.0**-24


def epoch_order(seed: int, first_unit: int, epoch: int, steps: int) -> Array:
    """The order in which UPDATE sees the steps of a record in one local epoch."""
    key = random_key(random_key(random_key(seed, STREAM_UPDATE), first_unit), epoch)
    order = list(range(steps))
    for i in range(steps, 1, -1):
        j = random_below(key, i, i)
        order[i - 1], order[j] = order[j], order[i - 1]
    return np.array(order)


# ---- Records ----------------------------------------------------------------------------------


@dataclass
class Episode:
    """One episode of a record; `observations` [steps + 1, size] is what the networks see."""

    unit: int
    end: int
    observations: Array
    rewards: Array
    log_probabilities: Array
    actions: Array
    stored: list[bytes]


def observe_floats(stored: bytes) -> Array:
    """The observation of an environment that keeps it as f32."""
    return np.frombuffer(stored, "<f4")


def decode(record: bytes, stored: int, observe: Observe = observe_floats) -> list[Episode]:
    """The episodes of a record whose observations take `stored` bytes each. Lies raise AssertionError."""
    found, at = [], 0
    while at < len(record):
        magic, size, unit, steps, end = HEADER.unpack_from(record, at)
        assert magic == MAGIC
        assert size == 24 + stored * (steps + 1) + 8 * steps + (steps + 3) // 4 * 4
        body = record[at + 24 : at + size]
        rows = [body[i * stored : (i + 1) * stored] for i in range(steps + 1)]
        rest = body[stored * (steps + 1) :]
        found.append(
            Episode(
                unit=unit,
                end=end,
                observations=np.array([observe(row) for row in rows]),
                rewards=np.frombuffer(rest, "<f4", steps),
                log_probabilities=np.frombuffer(rest, "<f4", steps, 4 * steps),
                actions=np.frombuffer(rest, np.uint8, steps, 8 * steps).astype(np.int64),
                stored=rows,
            )
        )
        assert not any(rest[9 * steps :])
        at += size
    return found


# ---- Networks ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """The shapes of a package's tensors: names with their slices of the flat weights."""

    shapes: dict[str, tuple[int, ...]]

    @classmethod
    def of(cls, package: Path) -> "Policy":
        """The policy of a package's manifest."""
        return cls({entry["name"]: tuple(entry["shape"]) for entry in manifest(package)["parameters"]})

    def split(self, flat: Array) -> dict[str, Array]:
        """Views of the tensors by name."""
        parts, at = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            parts[name] = flat[at : at + size].reshape(shape)
            at += size
        assert at == flat.size
        return parts

    def forward(self, flat: Array, x: Array, of: str) -> tuple[Array, Array, Array]:
        """Both hidden layers and the outputs [batch, outputs] of the `actor` or the `critic`."""
        w = self.split(flat)
        h1 = np.tanh(x @ w[f"{of}.hidden1.weight"] + w[f"{of}.hidden1.bias"])
        h2 = np.tanh(h1 @ w[f"{of}.hidden2.weight"] + w[f"{of}.hidden2.bias"])
        return h1, h2, h2 @ w[f"{of}.output.weight"].T + w[f"{of}.output.bias"]

    def backward(
        self, flat: Array, into: Array, x: Array, h1: Array, h2: Array, slopes: Array, of: str
    ) -> None:
        """Puts the gradient of one network into the flat gradient, given the slopes in its outputs."""
        w, g = self.split(flat), self.split(into)
        g[f"{of}.output.weight"][:] = slopes.T @ h2
        g[f"{of}.output.bias"][:] = slopes.sum(axis=0)
        back = slopes @ w[f"{of}.output.weight"] * (1 - h2 * h2)
        g[f"{of}.hidden2.weight"][:] = h1.T @ back
        g[f"{of}.hidden2.bias"][:] = back.sum(axis=0)
        back = back @ w[f"{of}.hidden2.weight"].T * (1 - h1 * h1)
        g[f"{of}.hidden1.weight"][:] = x.T @ back
        g[f"{of}.hidden1.bias"][:] = back.sum(axis=0)

    def values(self, flat: Array, x: Array) -> Array:
        """The critic's values [batch]."""
        found: Array = self.forward(flat, x, "critic")[2][:, 0]
        return found


def log_softmax(logits: Array) -> Array:
    """Logarithms of the probabilities, along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    logs: Array = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return logs


# ---- Learning ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What PPO is run with; names as in the manifests."""

    batch: int
    rate: float
    epochs: int
    discount: float
    trace: float
    clip: float
    entropy_weight: float
    value_weight: float
    gradient_norm: float
    reward_scale: float = 1.0


@dataclass
class Batch:
    """Steps to learn from, each array with one entry a step."""

    observations: Array
    actions: Array
    log_probabilities: Array
    advantages: Array
    targets: Array

    def pick(self, which: Array) -> "Batch":
        """The steps of these numbers."""
        return Batch(*(getattr(self, name)[which] for name in self.__dataclass_fields__))


def prepare(
    policy: Policy,
    flat: Array,
    episodes: list[Episode],
    settings: Settings,
    rewards: list[Array] | None = None,
) -> Batch:
    """All steps of the episodes with advantages (normalised) and targets; `rewards` instead of their own."""
    advantages, targets = [], []
    for number, episode in enumerate(episodes):
        values = policy.values(flat, episode.observations.astype(flat.dtype))
        if episode.end == TERMINATED:
            values[-1] = 0
        learnt = episode.rewards if rewards is None else rewards[number]
        deltas = learnt * settings.reward_scale + settings.discount * values[1:] - values[:-1]
        found, running = np.empty_like(deltas), 0.0
        for t in reversed(range(len(deltas))):
            running = deltas[t] + settings.discount * settings.trace * running
            found[t] = running
        advantages.append(found)
        targets.append(found + values[:-1])
    joined = np.concatenate(advantages)
    return Batch(
        observations=np.concatenate([e.observations[:-1] for e in episodes]).astype(flat.dtype),
        actions=np.concatenate([e.actions for e in episodes]),
        log_probabilities=np.concatenate([e.log_probabilities for e in episodes]).astype(flat.dtype),
        advantages=((joined - joined.mean()) / (joined.std() + 1e-8)).astype(flat.dtype),
        targets=np.concatenate(targets).astype(flat.dtype),
    )


def losses(policy: Policy, flat: Array, batch: Batch, settings: Settings) -> dict[str, Array]:
    """Each step's losses and what is shown of them, by the manifest's names."""
    logs = log_softmax(policy.forward(flat, batch.observations, "actor")[2])
    change = np.take_along_axis(logs, batch.actions[:, None], 1)[:, 0] - batch.log_probabilities
    ratio = np.exp(change)
    clipped = np.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    error = policy.values(flat, batch.observations) - batch.targets
    return {
        "policyLoss": -np.minimum(ratio * batch.advantages, clipped * batch.advantages),
        "valueLoss": 0.5 * error * error,
        "entropy": -(np.exp(logs) * logs).sum(axis=1),
        "divergence": ratio - 1 - change,
        "clipped": (ratio != clipped).astype(flat.dtype),
    }


def total_loss(policy: Policy, flat: Array, batch: Batch, settings: Settings) -> float:
    """What UPDATE descends on, the mean over the batch."""
    parts = losses(policy, flat, batch, settings)
    weighted = settings.value_weight * parts["valueLoss"] - settings.entropy_weight * parts["entropy"]
    return float((parts["policyLoss"] + weighted).mean())


def gradient(policy: Policy, flat: Array, batch: Batch, settings: Settings) -> Array:
    """The derivative of `total_loss`, by back-propagation."""
    x, share, found = batch.observations, flat.dtype.type(1 / len(batch.actions)), np.zeros_like(flat)
    h1, h2, logits = policy.forward(flat, x, "actor")
    logs = log_softmax(logits)
    probabilities = np.exp(logs)
    chosen = np.zeros_like(logs)
    np.put_along_axis(chosen, batch.actions[:, None], 1, 1)
    ratio = np.exp((logs * chosen).sum(axis=1) - batch.log_probabilities)
    clipped = np.clip(ratio, 1 - settings.clip, 1 + settings.clip)
    free = clipped * batch.advantages >= ratio * batch.advantages
    slope = np.where(free, -batch.advantages * ratio * share, 0)[:, None]
    entropy = -(probabilities * logs).sum(axis=1, keepdims=True)
    slopes = slope * (chosen - probabilities) + settings.entropy_weight * share * probabilities * (
        logs + entropy
    )
    policy.backward(flat, found, x, h1, h2, slopes.astype(flat.dtype), "actor")
    h1, h2, values = policy.forward(flat, x, "critic")
    slopes = settings.value_weight * share * (values - batch.targets[:, None])
    policy.backward(flat, found, x, h1, h2, slopes.astype(flat.dtype), "critic")
    return found


class Adam:
    """Adam from zero, on a gradient that is cut to a norm first."""

    def __init__(self, flat: Array, settings: Settings) -> None:
        self._first, self._second, self._step = np.zeros_like(flat), np.zeros_like(flat), 0
        self._settings = settings

    def step(self, flat: Array, slopes: Array) -> None:
        """One step, in place."""
        norm = float(np.sqrt((slopes * slopes).sum()))
        if norm > self._settings.gradient_norm:
            slopes = slopes * flat.dtype.type(self._settings.gradient_norm / norm)
        self._step += 1
        self._first += 0.1 * (slopes - self._first)
        self._second += 0.001 * (slopes * slopes - self._second)
        root = np.sqrt(self._second / (1 - 0.999**self._step))
        flat -= self._settings.rate / (1 - 0.9**self._step) * self._first / (root + 1e-5)


def update(policy: Policy, flat: Array, batch: Batch, settings: Settings, orders: list[Array]) -> None:
    """Trains the flat weights in place: a pass for each order, in minibatches of even size."""
    adam, steps = Adam(flat, settings), len(batch.actions)
    count = max(1, (steps + settings.batch // 2) // settings.batch)
    for order in orders:
        for k in range(count):
            part = batch.pick(order[k * steps // count : (k + 1) * steps // count])
            adam.step(flat, gradient(policy, flat, part, settings))


# ---- The packages' environments -----------------------------------------------------------------

SIDE = 8
STATE = (
    "column",
    "row",
    "key_column",
    "key_row",
    "wall_column",
    "door_row",
    "goal_column",
    "goal_row",
    "has_key",
    "open",
    "steps",
    "nothing",
)
WAYS = ((0, -1), (1, 0), (0, 1), (-1, 0))


def grid_state(stored: bytes) -> dict[str, int]:
    """The state of gridworld by name."""
    return dict(zip(STATE, stored, strict=True))


def grid_blocked(s: dict[str, int], action: int) -> bool:
    """Whether a step of gridworld goes nowhere."""
    column, row = s["column"] + WAYS[action][0], s["row"] + WAYS[action][1]
    if not (0 <= column < SIDE and 0 <= row < SIDE):
        return True
    return column == s["wall_column"] and (row != s["door_row"] or not (s["open"] or s["has_key"]))


def observe_grid(stored: bytes) -> Array:
    """What the networks of gridworld see."""
    s = grid_state(stored)
    x, y, most = s["column"], s["row"], SIDE - 1
    key = (0, 0) if s["has_key"] else (s["key_column"] - x, s["key_row"] - y)
    door, goal = (s["wall_column"] - x, s["door_row"] - y), (s["goal_column"] - x, s["goal_row"] - y)
    ways = [float(grid_blocked(s, action)) for action in range(4)]
    apart = [key[0] / most, key[1] / most, s["has_key"], door[0] / most, door[1] / most, s["open"]]
    side = float(np.sign(x - s["wall_column"]))
    return np.array([2 * x / most - 1, 2 * y / most - 1, *apart, goal[0] / most, goal[1] / most, side, *ways])


def grid_potential(stored: bytes) -> float:
    """Minus the steps that the shortest way of gridworld still needs, over 16."""
    s = grid_state(stored)
    at, way = (s["column"], s["row"]), 0
    stops = [] if s["has_key"] else [(s["key_column"], s["key_row"])]
    if at[0] < s["wall_column"]:
        stops.append((s["wall_column"], s["door_row"]))
    for stop in [*stops, (s["goal_column"], s["goal_row"])]:
        way += abs(stop[0] - at[0]) + abs(stop[1] - at[1])
        at = stop
    return -way / (2 * SIDE)


def grid_shaped(episode: Episode, discount: float, weight: float) -> Array:
    """Rewards of an episode of gridworld with shaping."""
    potential = np.array([grid_potential(stored) for stored in episode.stored])
    if episode.end == TERMINATED:
        potential[-1] = 0
    shaped: Array = episode.rewards + weight * (discount * potential[1:] - potential[:-1])
    return shaped
