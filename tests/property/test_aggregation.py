"""Aggregation against the published formulas, values worked out by hand, and a weighted mean's invariants."""

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from covey_coordinator.domain import aggregation as module
from covey_coordinator.domain.aggregation import (
    Aggregation,
    Strategy,
    accumulate,
    initial_state,
    optimizer_names,
    update_block,
)
from covey_kit.errors import InvalidArgument, Reason

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Results = Sequence[tuple[F32, int]]  # deltas and their units
History = Sequence[Results]  # one for each round

weight_values = st.floats(-1e3, 1e3, width=32)
unit_counts = st.integers(0, 1_000_000)
fractions = st.floats(0.0, 0.999)


def vectors(count: int) -> st.SearchStrategy[F32]:
    """Returns f32 vectors of that length."""
    return hnp.arrays(np.float32, count, elements=weight_values)


@st.composite
def aggregations(draw: st.DrawFn) -> Aggregation:
    """Any strategy with any settings that make numerical sense."""
    strategy: Strategy = draw(st.sampled_from(list(Strategy)))
    rate = draw(st.floats(1e-4, 10.0))
    match strategy:
        case Strategy.FED_AVG:
            return Aggregation.resolve(strategy, server_learning_rate=rate)
        case Strategy.FED_AVG_M:
            return Aggregation.resolve(strategy, server_learning_rate=rate, momentum=draw(fractions))
        case Strategy.FED_ADAM:
            return Aggregation.resolve(
                Strategy.FED_ADAM,
                server_learning_rate=rate,
                beta1=draw(fractions),
                beta2=draw(fractions),
                tau=draw(st.floats(1e-6, 1.0)),
            )


@st.composite
def rounds(draw: st.DrawFn) -> tuple[F32, History]:
    """Initial weights and, for each of a few rounds, the deltas of its participants with their units."""
    count = draw(st.integers(1, 12))
    participant = st.tuples(vectors(count), st.integers(1, 10_000))
    many = st.lists(st.lists(participant, min_size=1, max_size=5), min_size=1, max_size=4)
    return draw(vectors(count)), draw(many)


def mean_of(results: Results) -> F64:
    """Returns the weighted mean as the coordinator forms it: a running sum, divided once."""
    acc = np.zeros(results[0][0].size)
    for delta, units in results:
        accumulate(acc, delta, float(units))
    return acc / float(sum(units for _, units in results))


def run(a: Aggregation, weights: F32, history: History) -> tuple[F32, dict[str, F32]]:
    """Trains several rounds with the code under test."""
    state = {name: initial_state(a, name, weights.size) for name in optimizer_names(a)}
    for results in history:
        weights, state = update_block(a, weights, mean_of(results), state)
    return weights, state


class Published:
    """The formulas of arXiv:2003.00295 once more, naively, in f64 over whole arrays.

    Nothing is shared with the code under test. The weights and the state between two rounds are f32, as a
    checkpoint holds them.
    """

    def __init__(self, a: Aggregation, weights: F32) -> None:
        self.a = a
        self.x = weights
        self.m = np.zeros(weights.size, dtype=np.float32)
        start = a.tau**2 if a.tau is not None and a.strategy is Strategy.FED_ADAM else 0.0
        self.v = np.full(weights.size, start, dtype=np.float32)

    def round(self, results: Results) -> None:
        """One pass of the outer loop: lines 10 to 14 of algorithm 2, or algorithm 1's server step."""
        total = sum(units for _, units in results)
        shares = np.array([units / total for _, units in results])
        delta = np.einsum("k,kn->n", shares, np.array([d for d, _ in results], dtype=np.float64))
        x, m, v = (array.astype(np.float64) for array in (self.x, self.m, self.v))
        rate = self.a.server_learning_rate
        if self.a.strategy is Strategy.FED_AVG:
            x = x + rate * delta
        elif self.a.strategy is Strategy.FED_AVG_M:
            assert self.a.momentum is not None
            v = self.a.momentum * v + delta
            x = x + rate * v
        else:
            assert self.a.beta1 is not None
            assert self.a.beta2 is not None
            assert self.a.tau is not None
            m = self.a.beta1 * m + (1 - self.a.beta1) * delta
            v = self.a.beta2 * v + (1 - self.a.beta2) * np.square(delta)
            x = x + rate * m / (np.sqrt(v) + self.a.tau)
        self.x, self.m, self.v = x.astype(np.float32), m.astype(np.float32), v.astype(np.float32)


@given(aggregations(), rounds())
def test_follows_the_published_formulas(a: Aggregation, case: tuple[F32, History]) -> None:
    """Over several rounds weights and state are those of the paper's algorithms, up to f32 rounding."""
    weights, history = case
    reference = Published(a, weights)
    for results in history:
        reference.round(results)

    got, state = run(a, weights, history)

    # Per round the two may differ by a rounding of the mean (f64) and then of the state (f32).
    scale = 1e-6 * (1.0 + a.server_learning_rate) * (1.0 + float(np.abs(got).max()))
    np.testing.assert_allclose(got, reference.x, rtol=1e-5, atol=max(scale, 1e-6))
    if "optimizer.m" in state:
        np.testing.assert_allclose(state["optimizer.m"], reference.m, rtol=1e-5, atol=1e-4)
    if "optimizer.v" in state:
        np.testing.assert_allclose(state["optimizer.v"], reference.v, rtol=1e-5, atol=1e-3)


def test_fed_avg_by_hand() -> None:
    """FedAvg: 10 units of (1, −2) and 30 units of (3, 2) have the mean (2.5, 1)."""
    a = Aggregation.resolve(Strategy.FED_AVG)
    results = [(np.array([1, -2], dtype=np.float32), 10), (np.array([3, 2], dtype=np.float32), 30)]

    weights, state = run(a, np.array([1.0, 1.0], dtype=np.float32), [results])

    assert weights.tolist() == [3.5, 2.0]
    assert state == {}


def test_fed_avg_m_by_hand() -> None:
    """FedAvgM, β = 0.5, η = 2, deltas 1, 1, 0: v = 1, 1.5, 0.75 and w = 2, 5, 6.5."""
    a = Aggregation.resolve(Strategy.FED_AVG_M, server_learning_rate=2.0, momentum=0.5)
    weights = np.zeros(1, dtype=np.float32)
    state = {"optimizer.v": initial_state(a, "optimizer.v", 1)}

    seen = []
    for delta in (1.0, 1.0, 0.0):
        weights, state = update_block(a, weights, np.array([delta]), state)
        seen.append((state["optimizer.v"].item(), weights.item()))

    assert seen == [(1.0, 2.0), (1.5, 5.0), (0.75, 6.5)]


def test_fed_adam_by_hand() -> None:
    """FedAdam, β₁ = 0.5, β₂ = 0.75, τ = 0.5, η = 1, Δ̄ = 0.5: m = 0.25, v = 0.75 × 0.25 + 0.25 × 0.25 = 0.25,
    √v + τ = 1, so w grows by exactly 0.25.
    """
    a = Aggregation.resolve(Strategy.FED_ADAM, server_learning_rate=1.0, beta1=0.5, beta2=0.75, tau=0.5)
    state = {name: initial_state(a, name, 1) for name in optimizer_names(a)}
    assert state["optimizer.v"].item() == 0.25

    weights, state = update_block(a, np.array([1.0], dtype=np.float32), np.array([0.5]), state)

    assert (weights.item(), state["optimizer.m"].item(), state["optimizer.v"].item()) == (1.25, 0.25, 0.25)


def test_fed_adam_defaults_in_fifty_digits() -> None:
    """With the default settings, two rounds agree with 50-digit decimal arithmetic to the last bit of f32."""
    a = Aggregation.resolve(Strategy.FED_ADAM)
    state = {name: initial_state(a, name, 1) for name in optimizer_names(a)}
    weights = np.array([0.125], dtype=np.float32)

    with localcontext() as context:
        context.prec = 50
        beta1, beta2, tau, rate = Decimal("0.9"), Decimal("0.99"), Decimal("0.001"), Decimal("0.01")
        w, m, v = Decimal("0.125"), Decimal(0), Decimal(float(np.float32(1e-6)))
        for delta in (0.1, -0.03):
            weights, state = update_block(a, weights, np.array([delta]), state)
            m = beta1 * m + (1 - beta1) * Decimal(delta)
            v = beta2 * v + (1 - beta2) * Decimal(delta) ** 2
            w += rate * m / (v.sqrt() + tau)
            rounded = [np.float32(float(value)) for value in (w, m, v)]

            assert [weights[0], state["optimizer.m"][0], state["optimizer.v"][0]] == rounded
            w, m, v = (Decimal(float(value)) for value in rounded)


@given(st.data())
def test_order_of_arrival_moves_the_mean_by_rounding_alone(data: st.DataObject) -> None:
    """Any order of the same results has the same mean up to f64 rounding (`RoundSum` fixes the order)."""
    count = data.draw(st.integers(1, 20))
    results = data.draw(st.lists(st.tuples(vectors(count), unit_counts), min_size=1, max_size=8))
    assume(sum(units for _, units in results) > 0)
    shuffled = data.draw(st.permutations(results))

    bound = 1e-14 * len(results) * max(float(np.abs(delta).max()) for delta, _ in results)
    np.testing.assert_allclose(mean_of(shuffled), mean_of(results), rtol=0, atol=max(bound, 1e-300))


@given(st.data())
def test_scaling_all_counts_leaves_the_mean(data: st.DataObject) -> None:
    """Only the ratio of the counts matters: to the bit for a power of two, to f64 rounding for any factor."""
    count = data.draw(st.integers(1, 20))
    results = data.draw(st.lists(st.tuples(vectors(count), st.integers(1, 10_000)), min_size=1, max_size=6))
    factor = data.draw(st.integers(1, 1000))
    mean = mean_of(results)

    np.testing.assert_array_equal(mean_of([(delta, units * 1024) for delta, units in results]), mean)
    bound = 1e-14 * len(results) * max(float(np.abs(delta).max()) for delta, _ in results)
    scaled = mean_of([(delta, units * factor) for delta, units in results])
    np.testing.assert_allclose(scaled, mean, rtol=0, atol=max(bound, 1e-300))


@given(vectors(17), st.integers(1, 1 << 29))
def test_one_participant_is_its_own_mean(delta: F32, units: int) -> None:
    """The mean of one result is that result exactly, whatever its count."""
    np.testing.assert_array_equal(mean_of([(delta, units)]), delta)


@given(st.data())
def test_the_mean_lies_between_its_deltas(data: st.DataObject) -> None:
    """No element of the mean is outside of what participants sent, and zero units have no say."""
    count = data.draw(st.integers(1, 20))
    results = data.draw(st.lists(st.tuples(vectors(count), st.integers(1, 10_000)), min_size=1, max_size=6))
    bystander = (data.draw(vectors(count)), 0)
    stack = np.array([delta for delta, _ in results], dtype=np.float64)
    mean = mean_of(results)

    slack = 1e-12 * (1.0 + np.abs(stack).max())
    assert (mean >= stack.min(axis=0) - slack).all()
    assert (mean <= stack.max(axis=0) + slack).all()
    np.testing.assert_array_equal(mean_of([*results, bystander]), mean)


@given(st.data())
def test_bits_are_independent_of_blocks(data: st.DataObject) -> None:
    """Sum, weights and state have the same bytes in one piece, cut anywhere, and with any inner size."""
    a = data.draw(aggregations())
    seed = data.draw(st.integers(0, 1000))
    count = data.draw(st.integers(2, 300))
    cut = data.draw(st.integers(1, count - 1))
    inner = data.draw(st.sampled_from([1, 3, 16, 64, 1000]))
    random = np.random.default_rng(seed)
    deltas = [random.standard_normal(count).astype(np.float32) for _ in range(3)]
    weights = random.standard_normal(count).astype(np.float32)
    state = {name: np.abs(random.standard_normal(count)).astype(np.float32) for name in optimizer_names(a)}

    def result(parts: Sequence[slice]) -> list[bytes]:
        acc = np.zeros(count)
        out: dict[str, list[bytes]] = {"weights": [], **{name: [] for name in state}}
        for part in parts:
            for index, delta in enumerate(deltas):
                accumulate(acc[part], delta[part], 3.0 + index)
            some = {name: array[part] for name, array in state.items()}
            new, new_state = update_block(a, weights[part], acc[part] / 12.0, some)
            for name, array in {"weights": new, **new_state}.items():
                out[name].append(array.tobytes())
        return [acc.tobytes(), *(b"".join(pieces) for pieces in out.values())]

    whole = result([slice(0, count)])

    assert result([slice(0, cut), slice(cut, count)]) == whole
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CACHE_BLOCK", inner)
        assert result([slice(0, count)]) == whole


def test_bits_are_independent_of_blocks_at_the_real_block_size() -> None:
    """The same across the boundaries of the block size in use."""
    count = 2 * module._CACHE_BLOCK + 5
    random = np.random.default_rng(7)
    deltas = [random.standard_normal(count).astype(np.float32) for _ in range(3)]
    acc = np.zeros(count)
    for index, delta in enumerate(deltas):
        accumulate(acc, delta, 1.0 + index)

    naive = sum(delta.astype(np.float64) * (1.0 + index) for index, delta in enumerate(deltas))

    np.testing.assert_array_equal(acc, naive)


@pytest.mark.parametrize("strategy", Strategy)
def test_arguments_stay_as_they_are(strategy: Strategy) -> None:
    """`update_block` writes into neither the base weights nor the old state nor the mean."""
    a = Aggregation.resolve(strategy)
    weights, mean = np.ones(5, dtype=np.float32), np.full(5, 0.5)
    state = {name: initial_state(a, name, 5) for name in optimizer_names(a)}
    before = [array.tobytes() for array in (weights, mean, *state.values())]

    update_block(a, weights, mean, state)

    assert [array.tobytes() for array in (weights, mean, *state.values())] == before


def test_divergence_is_infinite_not_an_exception() -> None:
    """What no longer fits into f32 comes out infinite, without a warning, for the caller to find."""
    a = Aggregation.resolve(Strategy.FED_AVG, server_learning_rate=1e300)

    weights, _ = update_block(a, np.ones(3, dtype=np.float32), np.array([1.0, 0.0, -1.0]), {})

    assert weights.tolist() == [math.inf, 1.0, -math.inf]


def test_defaults_are_those_of_the_design() -> None:
    """Absent settings take the strategy's defaults; settings of other strategies stay absent."""
    assert Aggregation.resolve(Strategy.FED_AVG) == Aggregation(Strategy.FED_AVG, 1.0)
    assert Aggregation.resolve(Strategy.FED_AVG_M) == Aggregation(Strategy.FED_AVG_M, 1.0, momentum=0.9)
    assert Aggregation.resolve(Strategy.FED_ADAM) == Aggregation(
        Strategy.FED_ADAM, 0.01, beta1=0.9, beta2=0.99, tau=1e-3
    )


def test_every_violation_is_named() -> None:
    """Settings of another strategy and settings out of bounds come back together, each with its path."""
    with pytest.raises(InvalidArgument) as caught:
        Aggregation.resolve(
            Strategy.FED_AVG_M, server_learning_rate=math.nan, momentum=1.0, beta1=0.9, tau=0.1
        )

    assert caught.value.reason is Reason.INVALID_FIELD
    assert [violation.field for violation in caught.value.violations] == [
        "aggregation.server_learning_rate",
        "aggregation.momentum",
        "aggregation.beta1",
        "aggregation.tau",
    ]
    assert "FED_AVG_M has no such setting" in caught.value.violations[2].description


@pytest.mark.parametrize("tau", [0.0, -1.0, math.inf, math.nan, 1e20])
def test_tau_whose_square_is_no_f32_is_refused(tau: float) -> None:
    """v₀ = τ² is stored as f32, so τ has to leave it finite."""
    with pytest.raises(InvalidArgument, match="tau"):
        Aggregation.resolve(Strategy.FED_ADAM, tau=tau)


def test_shapes_and_types_that_do_not_fit_are_refused() -> None:
    """Wrong dtypes, shapes and states are the caller's mistake and named as such."""
    a = Aggregation.resolve(Strategy.FED_AVG_M)
    with pytest.raises(ValueError, match="expected f64"):
        accumulate(np.zeros(3), np.zeros(2, dtype=np.float32), 1.0)
    with pytest.raises(ValueError, match="expected optimizer tensors"):
        update_block(a, np.zeros(3, dtype=np.float32), np.zeros(3), {})
    with pytest.raises(ValueError, match="as the mean delta has"):
        update_block(
            a, np.zeros(3, dtype=np.float32), np.zeros(3), {"optimizer.v": np.zeros(2, dtype=np.float32)}
        )
    with pytest.raises(ValueError, match=r"no optimizer tensor 'optimizer\.m'"):
        initial_state(a, "optimizer.m", 3)
