"""Which chunks or units make which round, and what seeds what. Pure functions of the settings and the data.

Everything here is part of what decides a checkpoint's bytes, so each algorithm is fixed to the bit
and has known-answer tests. All arithmetic is modulo 2⁶⁴ unless it says otherwise.

The mixer is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators",
doi:10.1145/2660193.2660195): `splitmix64(x)` is the output of that generator whose state was x.

Derivation: `derive(seed, w₁, …, wₙ)` starts with h = splitmix64(seed) and takes each word in turn,
h = splitmix64(h xor w). The first word says what the number is for:

| first word | the others | used for |
|---|---|---|
| 1 | pass (from 0) | order of the chunks in a pass |
| 2 | round, index | the seed of an assignment; round 0, index 0 makes the initial weights |
| 3 | round | the seed of a validation on held-out data |
| 4 | round after which the sequence begins (0: a new job) | the seed of a sequence of units |

Order of a pass: the Fisher-Yates shuffle (Durstenfeld 1964) of 0 … n−1, from the last place down:
for i = n−1 … 1, swap places i and j, where j is drawn evenly from 0 … i. Draws come from SplitMix64
with the derived state; a draw below 2⁶⁴ − (2⁶⁴ mod (i+1)) gives j = draw mod (i+1), others are thrown
away, so that no place is favoured.

Rounds: pass p takes its chunks in that order, `assignments_per_round` a round. The last round of a
pass is short when they don't divide evenly: a round never spans two passes. A continued job goes on where
the queue of its checkpoint stands (`Origin`), with as many chunks a round as its own settings say.

Units (experience jobs) are numbered on and on: with A assignments a round of U units each, assignment i of
round r has the U units from (r−1)·A·U + i·U on. A continued job counts from its origin:
next_unit + (r−1−round)·A·U + i·U. Unit n of a sequence is seeded from (sequence seed, n) alone; what is
learnt from it is seeded from the assignment's seed. Evaluations play the package's own fixed units
0 … evaluationUnits−1 with the seed 0, the same for every checkpoint of every job.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from covey_coordinator.domain.spec import BEGINNING, ChunkOrder, Origin, Settings

__all__ = [
    "EVALUATION_SEED",
    "Position",
    "UnitRange",
    "assignment_seed",
    "chunk_order",
    "derive",
    "is_validation_round",
    "next_unit",
    "position_after",
    "round_chunks",
    "round_units",
    "rounds_per_pass",
    "rounds_wanted",
    "sequence_seed",
    "splitmix64",
    "to_signed",
    "validation_seed",
]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FOR_ORDER = 1
_FOR_ASSIGNMENT = 2
_FOR_VALIDATION = 3
_FOR_SEQUENCE = 4

EVALUATION_SEED = 0
"""Seeds evaluations on units that the model generates."""


@dataclass(frozen=True)
class UnitRange:
    """Units that the model generates.

    Attributes:
        first: number of the first one.
        units: how many.
        sequence_seed: seed of the sequence that they are of.
    """

    first: int
    units: int
    sequence_seed: int


def splitmix64(state: int) -> int:
    """Returns the output of SplitMix64 whose state is `state` (before the step)."""
    z = (state + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def derive(seed: int, *words: int) -> int:
    """Returns a number of 64 bits that depends on the seed and on every word."""
    mixed = splitmix64(seed & _MASK)
    for word in words:
        mixed = splitmix64(mixed ^ (word & _MASK))
    return mixed


def to_signed(value: int) -> int:
    """Reads 64 bits as a two's complement number, as the contract's int64 has it."""
    return value - (1 << 64) if value >> 63 else value


def assignment_seed(seed: int, round_number: int, index: int) -> int:
    """Returns the int64 that seeds everything random in an assignment."""
    return to_signed(derive(seed, _FOR_ASSIGNMENT, round_number, index))


def validation_seed(seed: int, round_number: int) -> int:
    """Returns the int64 that seeds the validation of a round."""
    return to_signed(derive(seed, _FOR_VALIDATION, round_number))


def sequence_seed(seed: int, round_number: int) -> int:
    """Returns the int64 that seeds the sequence of units that begins after a round; 0: with the job."""
    return to_signed(derive(seed, _FOR_SEQUENCE, round_number))


@lru_cache(maxsize=8)
def _shuffled(seed: int, pass_number: int, count: int) -> tuple[int, ...]:
    order = list(range(count))
    state = derive(seed, _FOR_ORDER, pass_number)
    for last in range(count - 1, 0, -1):
        bound = last + 1
        limit = (1 << 64) - (1 << 64) % bound
        while True:
            draw = splitmix64(state)
            state = (state + _GOLDEN) & _MASK
            if draw < limit:
                break
        place = draw % bound
        order[last], order[place] = order[place], order[last]
    return tuple(order)


def chunk_order(settings: Settings, pass_number: int, count: int) -> Sequence[int]:
    """Returns the places in the manifest of a pass's chunks, in the order in which they are worked on.

    Takes a microsecond a chunk the first time; call it in a thread for many.
    """
    if settings.chunk_order is ChunkOrder.MANIFEST:
        return range(count)
    return _shuffled(settings.seed, pass_number, count)


def rounds_per_pass(settings: Settings, chunk_count: int) -> int:
    """Returns how many rounds go once through the dataset."""
    return -(-chunk_count // settings.assignments_per_round)


def rounds_wanted(settings: Settings, chunk_count: int) -> int:
    """Returns the final round: the target, or as many rounds as the passes make."""
    if settings.target_round is not None:
        return settings.target_round
    passes = settings.epochs or 1
    if settings.units_per_assignment is not None:  # an experience job has no passes: its epochs are rounds
        return passes
    return passes * rounds_per_pass(settings, chunk_count)


@dataclass(frozen=True)
class Position:
    """Where the queue of chunks stands: the next chunk's pass and its place in that pass's order."""

    pass_number: int
    next_index: int


def position_after(
    settings: Settings, round_number: int, chunk_count: int, origin: Origin = BEGINNING
) -> Position:
    """Returns where the queue stands after a round; the origin's round leaves it at its beginning."""
    rounds = round_number - origin.round
    # What is left of the origin's pass is a pass of its own, shorter than the others.
    first = -(-(chunk_count - origin.next_index) // settings.assignments_per_round)
    if rounds < first:
        return Position(origin.pass_number, origin.next_index + rounds * settings.assignments_per_round)
    passes, step = divmod(rounds - first, rounds_per_pass(settings, chunk_count))
    return Position(origin.pass_number + 1 + passes, step * settings.assignments_per_round)


def round_chunks(
    settings: Settings, round_number: int, chunk_count: int, origin: Origin = BEGINNING
) -> list[int]:
    """Returns the places in the manifest of the chunks of a round, in assignment order."""
    start = position_after(settings, _before(origin, round_number), chunk_count, origin)
    order = chunk_order(settings, start.pass_number, chunk_count)
    return list(order[start.next_index : start.next_index + settings.assignments_per_round])


def _before(origin: Origin, round_number: int) -> int:
    """Returns the round before one that is trained in the job."""
    if round_number <= origin.round:
        raise ValueError(f"expected a round from {origin.round + 1}, found {round_number}")
    return round_number - 1


def next_unit(settings: Settings, round_number: int, origin: Origin) -> int:
    """Returns the number of the unit that comes after a round of an experience job."""
    assert settings.units_per_assignment is not None
    per_round = settings.assignments_per_round * settings.units_per_assignment
    return origin.next_unit + (round_number - origin.round) * per_round


def round_units(settings: Settings, round_number: int, origin: Origin) -> list[UnitRange]:
    """Returns the units of a round of an experience job, in assignment order."""
    assert settings.units_per_assignment is not None
    units = settings.units_per_assignment
    start = next_unit(settings, _before(origin, round_number), origin)
    return [
        UnitRange(start + index * units, units, origin.sequence_seed)
        for index in range(settings.assignments_per_round)
    ]


def is_validation_round(settings: Settings, round_number: int, final_round: int) -> bool:
    """Says whether a round is validated by itself: every `validation_interval` rounds, and the last."""
    interval = settings.validation_interval
    if interval == 0 or round_number == 0:
        return False
    return round_number % interval == 0 or round_number == final_round
