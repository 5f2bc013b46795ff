"""Records of experience may be any bytes: what isn't a record is refused in words, and nothing traps."""

import struct
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.experience_harness import ExperienceModule
from support.experience_packages import PACKAGES
from support.experience_reference import HEADER, MAGIC, Episode, decode, grid_state
from support.wasm_harness import UPDATE, ModuleError

BAD_DATA, DIVERGED = -2, -6
UNIT = 7


@dataclass(frozen=True)
class Prepared:
    """A module of a package, the weights of round 0, and a record of three of its episodes."""

    name: str
    module: ExperienceModule
    weights: bytes
    record: bytes


@pytest.fixture(scope="module", params=list(PACKAGES))
def prepared(request: pytest.FixtureRequest) -> Prepared:
    """Each package in turn."""
    module = ExperienceModule(PACKAGES[request.param].path, {"localEpochs": 1})
    module.check("initialize", 3)
    return Prepared(request.param, module, module.all_weights().tobytes(), module.play(UNIT, 3))


def accepts(module: ExperienceModule, record: bytes) -> bool:
    """Whether the module takes a record; a refusal must have its status and words."""
    pointer = module.put(record)
    status = module.call("load_experience", pointer, len(record))
    module.call("free", pointer, len(record))
    if status < 0:
        assert status == BAD_DATA
        assert module.error()
    return status >= 0


def grid_valid(stored: bytes) -> bool:
    """Whether 12 bytes are a state of gridworld."""
    s = grid_state(stored)
    return (
        max(s["column"], s["row"], s["door_row"], s["key_row"], s["goal_row"], s["goal_column"]) < 8
        and 2 <= s["wall_column"] <= 5
        and s["key_column"] < s["wall_column"] < s["goal_column"]
        and s["open"] <= s["has_key"] <= 1
        and s["steps"] <= 100
        and s["nothing"] == 0
        and (s["column"] < s["wall_column"] or s["open"] == 1)
        and (s["column"] != s["wall_column"] or s["row"] == s["door_row"])
    )


def bounded(name: str, episode: Episode) -> bool:
    """Whether an episode's contents are of the environment."""
    most = {"cartpole": 1e6, "duel": 2.0}.get(name, 0.0)
    if name == "gridworld":
        shown = all(grid_valid(stored) for stored in episode.stored)
    else:
        shown = all((np.abs(np.frombuffer(stored, "<f4")) <= most).all() for stored in episode.stored)
    logs = episode.log_probabilities
    return bool(
        shown
        and (np.abs(episode.rewards) <= 1).all()
        and ((logs >= -80) & (logs <= 0)).all()
        and episode.actions.max() < {"cartpole": 2, "gridworld": 4, "duel": 3}[name]
    )


def valid(name: str, record: bytes) -> bool:
    """Whether bytes are a record, by the format's description."""
    facts = PACKAGES[name]
    try:
        episodes = decode(record, facts.stored, lambda stored: np.frombuffer(stored, np.uint8))
    except (AssertionError, struct.error, ValueError):
        return False
    for number, episode in enumerate(episodes):
        steps = len(episode.actions)
        if not (1 <= steps <= facts.steps_most and episode.unit == episodes[0].unit + number >= 0):
            return False
        if episode.end != 1 and not (episode.end == 2 and steps == facts.steps_most):
            return False
        if not bounded(name, episode):
            return False
    return True


def use(module: ExperienceModule, weights: bytes, record: bytes) -> None:
    """Learns from a record that was accepted: either it works, or it says that the numbers ran away."""
    module.set_weights(np.frombuffer(weights, "<f4"))
    units = module.load_experience(record)
    module.check("begin", UPDATE, HEADER.unpack_from(record)[2] if units else 0, units)
    status = 1
    while status > 0:
        status = module.call("step")

    assert status in (0, DIVERGED)
    assert status == DIVERGED or np.isfinite(module.all_weights()).all()


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=400), head=st.booleans())
def test_random_bytes_are_refused(prepared: Prepared, data: bytes, head: bool) -> None:
    """Random bytes, also behind a true magic number, are refused unless they are nothing at all."""
    module, record = prepared.module, prepared.record
    bytes_ = record[: min(len(data), 24)] + data if head else data

    assert accepts(module, bytes_) == (bytes_ == b"" or valid(prepared.name, bytes_))


@settings(max_examples=150, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=3),
    cut=st.one_of(st.none(), st.integers(0, 1 << 20)),
)
def test_damaged_records_are_judged_as_the_format_says(
    prepared: Prepared, changes: list[tuple[int, int]], cut: int | None
) -> None:
    """A record with changed bytes or a missing end is taken if it's still one, and then used safely."""
    module, weights, record = prepared.module, prepared.weights, prepared.record
    damaged = bytearray(record)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    if cut is not None:
        del damaged[cut % len(damaged) :]
    taken = accepts(module, bytes(damaged))

    assert taken == valid(prepared.name, bytes(damaged))
    if taken:
        use(module, weights, bytes(damaged))


@settings(max_examples=60, deadline=None)
@given(
    field=st.sampled_from(["rewards", "log_probabilities", "observations"]),
    bits=st.integers(0, 2**32 - 1),
    step=st.integers(0, 10**6),
)
def test_any_number_in_any_place(prepared: Prepared, field: str, bits: int, step: int) -> None:
    """Any 32 bits as a reward, a probability or a part of an observation are judged as described."""
    module, weights, record = prepared.module, prepared.weights, prepared.record
    stored, (_, size, _, steps, _) = PACKAGES[prepared.name].stored, HEADER.unpack_from(record)
    begins = {"observations": 24, "rewards": 24 + stored * (steps + 1)}
    begins["log_probabilities"] = begins["rewards"] + 4 * steps
    numbers = {"observations": stored // 4 * (steps + 1)}.get(field, steps)
    at = begins[field] + 4 * (step % numbers)
    changed = record[:at] + struct.pack("<I", bits) + record[at + 4 : size] + record[size:]
    taken = accepts(module, changed)

    assert taken == valid(prepared.name, changed)
    if taken:
        use(module, weights, changed)


def header(record: bytes, **changes: int) -> bytes:
    """The record with other numbers in its first header."""
    names = ("magic", "size", "unit", "steps", "end")
    values = dict(zip(names, HEADER.unpack_from(record), strict=True)) | changes
    return HEADER.pack(*(values[name] for name in names)) + record[24:]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"magic": MAGIC + 1}, "EPP1"),
        ({"steps": 0}, "steps, expected 1"),
        ({"steps": 2**32 - 1}, "steps, expected 1"),
        ({"size": 0}, "says 0 bytes"),
        ({"size": 2**32 - 1}, "bytes, expected"),
        ({"unit": -1}, "unit"),
        ({"unit": UNIT + 1}, "unit that follows"),
        ({"unit": 2**63 - 1}, "unit that follows"),
        ({"end": 0}, "can't end"),
        ({"end": 3}, "can't end"),
    ],
)
def test_headers_that_lie_are_named(prepared: Prepared, changes: dict[str, int], words: str) -> None:
    """Each number of a header is checked, and the error says which episode and what was expected."""
    module, record = prepared.module, prepared.record
    with pytest.raises(ModuleError, match=words) as caught:
        module.load_experience(header(record, **changes))

    assert caught.value.status == BAD_DATA
    assert "episode" in caught.value.message


def test_records_out_of_order_are_refused(prepared: Prepared) -> None:
    """Records joined in the wrong order, twice, or with a gap aren't the record of a range."""
    module, record = prepared.module, prepared.record
    module.set_weights(np.frombuffer(prepared.weights, "<f4"))
    parts = [module.play(UNIT + k, 1) for k in range(3)]

    assert b"".join(parts) == record
    for wrong in ([1, 0, 2], [0, 0, 1], [0, 2]):
        assert not accepts(module, b"".join(parts[k] for k in wrong))
    assert accepts(module, b"".join(parts[1:]))


def test_nothing_is_loaded_after_an_error(prepared: Prepared) -> None:
    """A record that is refused takes the last one with it: UPDATE can't train on what isn't meant."""
    module, record = prepared.module, prepared.record
    assert accepts(module, record)
    assert not accepts(module, record[:-4])

    with pytest.raises(ModuleError, match="covey_load_experience comes first"):
        module.check("begin", UPDATE, UNIT, 3)


def test_facts_are_those_of_the_packages(prepared: Prepared) -> None:
    """The sizes that these tests assume are the records' own, and the undamaged record is a valid one."""
    facts = PACKAGES[prepared.name]

    assert [episode.unit for episode in decode(prepared.record, facts.stored, facts.observe)] == [7, 8, 9]
    assert valid(prepared.name, prepared.record)
