"""Which chunks make which round, and what seeds what: fixed to the bit."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_coordinator.domain.plan import (
    Position,
    UnitRange,
    assignment_seed,
    chunk_order,
    derive,
    is_validation_round,
    next_unit,
    position_after,
    round_chunks,
    round_units,
    rounds_per_pass,
    rounds_wanted,
    splitmix64,
    to_signed,
    validation_seed,
)
from covey_coordinator.domain.spec import BEGINNING, ChunkOrder, Origin
from support.coordinator_domain import settings

SEEDS = st.integers(-(2**63), 2**63 - 1)


def test_splitmix64_known_answers() -> None:
    """The mixer is SplitMix64: the first outputs for seed 1234567 are those that its authors publish."""
    state, outputs = 1234567, []
    for _ in range(3):
        outputs.append(splitmix64(state))
        state = (state + 0x9E3779B97F4A7C15) % 2**64

    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_derivation_and_order_known_answers() -> None:
    """Seeds and orders are fixed for all time: checkpoints depend on them."""
    assert derive(0, 1, 0) == KNOWN["derive"]
    assert assignment_seed(42, 3, 1) == KNOWN["assignment"]
    assert validation_seed(42, 3) == KNOWN["validation"]
    assert list(chunk_order(settings(seed=7), 0, 10)) == KNOWN["order"]
    assert list(chunk_order(settings(seed=7), 1, 10)) == KNOWN["next order"]


KNOWN = {
    "derive": 4964578127960768432,
    "assignment": -7248303506455518647,
    "validation": -2801055180047649561,
    "order": [6, 9, 4, 5, 7, 0, 3, 2, 8, 1],
    "next order": [9, 3, 8, 1, 0, 4, 6, 5, 2, 7],
}


@given(SEEDS, st.integers(0, 50), st.integers(1, 60))
def test_a_pass_takes_every_chunk_once(seed: int, pass_number: int, count: int) -> None:
    """The order of a pass is a permutation, and the same each time."""
    order = list(chunk_order(settings(seed=seed), pass_number, count))

    assert sorted(order) == list(range(count))
    assert order == list(chunk_order(settings(seed=seed), pass_number, count))


@given(SEEDS, st.integers(1, 40), st.integers(1, 12), st.integers(1, 4))
def test_rounds_of_a_pass_make_the_whole_pass(seed: int, count: int, per_round: int, passes: int) -> None:
    """The rounds of each pass take all its chunks once; only the last may be short; none spans two passes."""
    chosen = settings(seed=seed, per_round=per_round, epochs=passes)
    wanted = rounds_wanted(chosen, count)
    in_pass = rounds_per_pass(chosen, count)

    assert wanted == passes * in_pass
    for number in range(passes):
        rounds = [round_chunks(chosen, number * in_pass + step + 1, count) for step in range(in_pass)]
        assert [c for r in rounds for c in r] == list(chunk_order(chosen, number, count))
        assert all(len(r) == per_round for r in rounds[:-1])
        assert 1 <= len(rounds[-1]) <= per_round


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 100))
def test_the_position_says_where_the_next_round_begins(count: int, per_round: int, number: int) -> None:
    """The position after a round is the place of the next round's first chunk."""
    chosen = settings(per_round=per_round)
    position = position_after(chosen, number - 1, count)

    first = chunk_order(chosen, position.pass_number, count)[position.next_index]
    assert round_chunks(chosen, number, count)[0] == first


def test_manifest_order_and_target() -> None:
    """In manifest order chunks come as they are listed; a target decides how many rounds there are."""
    chosen = settings(order=ChunkOrder.MANIFEST, per_round=2, epochs=None, target=5)

    assert [round_chunks(chosen, n, 3) for n in range(1, 4)] == [[0, 1], [2], [0, 1]]
    assert rounds_wanted(chosen, 3) == 5
    assert position_after(chosen, 0, 3) == Position(0, 0)
    assert position_after(chosen, 2, 3) == Position(1, 0)


def test_rounds_begin_at_one() -> None:
    """There are no chunks in round 0."""
    with pytest.raises(ValueError, match="round from 1"):
        round_chunks(settings(), 0, 3)


def test_seeds_differ_and_fit_an_int64() -> None:
    """Every assignment has a seed of its own, in the range of the contract's int64."""
    seeds = [assignment_seed(1, r, i) for r in range(50) for i in range(20)]
    seeds += [validation_seed(1, r) for r in range(50)]

    assert len(set(seeds)) == len(seeds)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert to_signed(2**64 - 1) == -1


def test_orders_are_even() -> None:
    """Over many passes each chunk comes first about equally often."""
    firsts = Counter(chunk_order(settings(seed=3), number, 5)[0] for number in range(2000))

    assert sorted(firsts) == [0, 1, 2, 3, 4]
    assert all(320 < times < 480 for times in firsts.values())


def test_validation_rounds() -> None:
    """Every N rounds and the last one; never with an interval of 0; never round 0."""
    chosen = settings(interval=3)

    assert [n for n in range(9) if is_validation_round(chosen, n, 8)] == [3, 6, 8]
    assert not any(is_validation_round(settings(), n, 8) for n in range(9))


def test_units_are_numbered_on_and_on() -> None:
    """Assignment i of round r begins at ((r-1)·A + i)·U; a continued job counts from where it begins."""
    chosen = replace(settings(per_round=2), units_per_assignment=5)
    later = Origin(round=3, sequence_seed=9, next_unit=30)

    assert [u.first for r in (1, 2, 3) for u in round_units(chosen, r, BEGINNING)] == [0, 5, 10, 15, 20, 25]
    assert round_units(chosen, 4, later) == [UnitRange(30, 5, 9), UnitRange(35, 5, 9)]
    assert next_unit(chosen, 5, later) == 50
    assert rounds_wanted(replace(chosen, epochs=7), 0) == 7


@given(
    count=st.integers(1, 40), per_round=st.integers(1, 9), split=st.integers(0, 20), more=st.integers(1, 9)
)
def test_a_queue_goes_on_where_it_stood(count: int, per_round: int, split: int, more: int) -> None:
    """Rounds counted from any point of the queue are the rounds that it has anyway."""
    chosen = settings(per_round=per_round)
    at = position_after(chosen, split, count)
    origin = Origin(split, at.pass_number, at.next_index)

    number = split + more
    assert round_chunks(chosen, number, count, origin) == round_chunks(chosen, number, count)
    assert position_after(chosen, number, count, origin) == position_after(chosen, number, count)


def test_a_queue_goes_on_in_rounds_of_another_size() -> None:
    """With another number of assignments the rest of the pass is cut anew; no chunk is lost or doubled."""
    chosen = settings(per_round=3, order=ChunkOrder.MANIFEST)
    origin = Origin(round=2, pass_number=0, next_index=4)

    assert [round_chunks(chosen, n, 9, origin) for n in (3, 4, 5)] == [[4, 5, 6], [7, 8], [0, 1, 2]]
