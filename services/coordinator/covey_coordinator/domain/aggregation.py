"""How the deltas of a round become the next weights.

Everything here is element-wise f64 arithmetic: additions, multiplications, divisions and square
roots, each rounded correctly by IEEE 754 and none of them a reduction over elements. So the bits of
a result depend on the values alone, never on block sizes, vector widths or threads.

Source of the formulas: Reddi et al. 2021, "Adaptive Federated Optimization", arXiv:2003.00295,
algorithm 1 (FedAvg, and FedAvgM as its server optimizer with momentum) and algorithm 2 (FedAdam).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from covey_kit.errors import InvalidArgument, Reason, Violation

__all__ = [
    "F32",
    "F64",
    "Aggregation",
    "Strategy",
    "accumulate",
    "initial_state",
    "optimizer_names",
    "update_block",
]

F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]

# Elements worked on at once: 32 Ki f64 values and their f32 sources stay in a core's second-level cache.
_CACHE_BLOCK: Final = 32 * 1024

# Two different things share the name v: FedAvgM's momentum, and FedAdam's second moment, which is never
# negative. A state is worth something only to the strategy that made it.
MOMENTUM: Final = "optimizer.v"
FIRST_MOMENT: Final = "optimizer.m"
SECOND_MOMENT: Final = "optimizer.v"


class Strategy(StrEnum):
    """How the mean delta is applied to the weights."""

    FED_AVG = "FED_AVG"
    FED_AVG_M = "FED_AVG_M"
    FED_ADAM = "FED_ADAM"


# The settings of each strategy and their defaults, in the order of the contract's fields.
_DEFAULTS: Final[Mapping[Strategy, Mapping[str, float]]] = {
    Strategy.FED_AVG: {"server_learning_rate": 1.0},
    Strategy.FED_AVG_M: {"server_learning_rate": 1.0, "momentum": 0.9},
    Strategy.FED_ADAM: {"server_learning_rate": 0.01, "beta1": 0.9, "beta2": 0.99, "tau": 1e-3},
}
_F32_MAX: Final = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Aggregation:
    """A strategy and every setting that is in force. Settings of other strategies are None.

    Attributes:
        strategy: how the mean delta is applied.
        server_learning_rate: η, > 0.
        momentum: β of FedAvgM, in [0, 1).
        beta1: β₁ of FedAdam, in [0, 1).
        beta2: β₂ of FedAdam, in [0, 1).
        tau: τ of FedAdam, > 0, also v₀ = τ².
    """

    strategy: Strategy
    server_learning_rate: float
    momentum: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    tau: float | None = None

    @classmethod
    def resolve(
        cls,
        strategy: Strategy,
        *,
        server_learning_rate: float | None = None,
        momentum: float | None = None,
        beta1: float | None = None,
        beta2: float | None = None,
        tau: float | None = None,
        path: str = "aggregation",
    ) -> Self:
        """Fills in the strategy's defaults where a setting is None.

        Args:
            strategy: the strategy.
            server_learning_rate: η. Defaults: 1 (FedAvg, FedAvgM), 0.01 (FedAdam).
            momentum: β of FedAvgM. Default 0.9.
            beta1: β₁ of FedAdam. Default 0.9.
            beta2: β₂ of FedAdam. Default 0.99.
            tau: τ of FedAdam. Default 1e-3.
            path: path of the settings in the request, the front part of each violation's field.

        Raises:
            InvalidArgument: with a violation for each setting that is out of bounds or another strategy's.
        """
        given = {
            "server_learning_rate": server_learning_rate,
            "momentum": momentum,
            "beta1": beta1,
            "beta2": beta2,
            "tau": tau,
        }
        defaults = _DEFAULTS[strategy]
        wrong = [
            Violation(f"{path}.{name}", problem)
            for name, value in given.items()
            if value is not None and (problem := _problem(strategy, name, value))
        ]
        if wrong:
            listed = "; ".join(f"{violation.field}: {violation.description}" for violation in wrong)
            raise InvalidArgument(
                Reason.INVALID_FIELD, f"the aggregation's settings don't fit: {listed}", violations=wrong
            )
        settings = dict(defaults)
        settings.update((name, float(value)) for name, value in given.items() if value is not None)
        return cls(strategy, **settings)


def _problem(strategy: Strategy, name: str, value: float) -> str:
    """Says what is wrong with a setting that was given; empty: nothing is."""
    if name not in _DEFAULTS[strategy]:
        known = ", ".join(_DEFAULTS[strategy])
        return f"{strategy} has no such setting (it has {known}); leave it out"
    if name == "server_learning_rate":
        return "" if 0 < value < math.inf else f"expected a finite number above 0, found {value}"
    if name == "tau":
        # v starts at τ² and is stored as f32.
        fits = 0 < value <= math.sqrt(_F32_MAX)
        return "" if fits else f"expected a number above 0, up to 1.8e19, found {value}"
    return "" if 0 <= value < 1 else f"expected a number from 0 to below 1, found {value}"


def optimizer_names(aggregation: Aggregation) -> tuple[str, ...]:
    """Returns the tensors of the optimizer's state, in the order in which a checkpoint lists them."""
    match aggregation.strategy:
        case Strategy.FED_AVG:
            return ()
        case Strategy.FED_AVG_M:
            return (MOMENTUM,)
        case Strategy.FED_ADAM:
            return (FIRST_MOMENT, SECOND_MOMENT)


def initial_state(aggregation: Aggregation, name: str, count: int) -> F32:
    """Returns `count` elements of an optimizer tensor as it is before the first round.

    FedAdam's v starts at τ² (rounded to f32), everything else at 0.
    """
    if name not in optimizer_names(aggregation):
        raise ValueError(f"{aggregation.strategy} has no optimizer tensor {name!r}")
    if aggregation.strategy is Strategy.FED_ADAM and name == SECOND_MOMENT:
        tau = _setting(aggregation.tau)
        return np.full(count, tau * tau, dtype=np.float32)
    return np.zeros(count, dtype=np.float32)


def accumulate(acc: F64, delta: F32, weight: float) -> None:
    """Adds `weight` × `delta` to `acc`, element by element, in place.

    The product and the sum are f64, each rounded once; blocks are there for the cache alone.

    Args:
        acc: f64[n], the running sum.
        delta: f32[n].
        weight: the number of units behind the delta.
    """
    if acc.shape != delta.shape or acc.dtype != np.float64 or delta.dtype != np.float32:
        found = f"{acc.dtype}{acc.shape} and {delta.dtype}{delta.shape}"
        raise ValueError(f"expected f64[n] and f32[n], found {found}")
    scratch = np.empty(min(_CACHE_BLOCK, acc.size), dtype=np.float64)
    for start in range(0, acc.size, _CACHE_BLOCK):
        part = acc[start : start + _CACHE_BLOCK]
        product = scratch[: part.size]
        product[...] = delta[start : start + _CACHE_BLOCK]
        product *= weight
        part += product


def update_block(
    aggregation: Aggregation, weights: F32, mean_delta: F64, state: Mapping[str, F32]
) -> tuple[F32, dict[str, F32]]:
    """Applies the mean delta to a range of the weights and of the optimizer's state.

    With Δ̄ = Σ nₖΔₖ / Σ nₖ (Reddi et al. 2021, arXiv:2003.00295; all in f64, in the order written):

    - FedAvg (algorithm 1 with server SGD): w ← w + η Δ̄
    - FedAvgM (algorithm 1 with momentum): v ← β v + Δ̄; w ← w + η v
    - FedAdam (algorithm 2): m ← β₁ m + (1−β₁) Δ̄; v ← β₂ v + (1−β₂) Δ̄²; w ← w + (η m) / (√v + τ)

    As in the paper, m and v aren't corrected for their bias. The new m and v enter w before they are
    rounded to f32; what the next round starts from are the rounded ones, so that a checkpoint holds all
    there is. Results may be infinite or NaN where the training diverged: the caller checks.

    Args:
        aggregation: strategy and settings.
        weights: f32[n].
        mean_delta: f64[n], the mean of the deltas weighted by their units.
        state: f32[n] for each of `optimizer_names(aggregation)`.

    Returns:
        The new weights, f32[n], and the new state; the arguments stay as they are.
    """
    names = optimizer_names(aggregation)
    if set(state) != set(names):
        raise ValueError(f"expected optimizer tensors {list(names)}, found {sorted(state)}")
    if any(array.shape != mean_delta.shape for array in (weights, *state.values())):
        shapes = {name: array.shape for name, array in {"weights": weights, **state}.items()}
        raise ValueError(f"expected {mean_delta.shape} as the mean delta has, found {shapes}")
    new_weights = np.empty_like(weights)
    new_state = {name: np.empty_like(state[name]) for name in names}
    # Overflow is the caller's to find, in all elements at once.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, mean_delta.size, _CACHE_BLOCK):
            part = slice(start, start + _CACHE_BLOCK)
            step = _step(aggregation, mean_delta[part], state, new_state, part)
            step += weights[part]
            new_weights[part] = step
    return new_weights, new_state


def _step(
    a: Aggregation, mean: F64, state: Mapping[str, F32], new_state: Mapping[str, F32], part: slice
) -> F64:
    """Writes the new optimizer state of `part` and returns what its weights change by."""
    match a.strategy:
        case Strategy.FED_AVG:
            return mean * a.server_learning_rate
        case Strategy.FED_AVG_M:
            v = np.multiply(state[MOMENTUM][part], _setting(a.momentum), dtype=np.float64)
            v += mean
            new_state[MOMENTUM][part] = v
            v *= a.server_learning_rate
            return v
        case Strategy.FED_ADAM:
            beta1, beta2 = _setting(a.beta1), _setting(a.beta2)
            m = np.multiply(state[FIRST_MOMENT][part], beta1, dtype=np.float64)
            m += mean * (1.0 - beta1)
            new_state[FIRST_MOMENT][part] = m
            v = np.multiply(state[SECOND_MOMENT][part], beta2, dtype=np.float64)
            square = mean * mean
            square *= 1.0 - beta2
            v += square
            new_state[SECOND_MOMENT][part] = v
            np.sqrt(v, out=v)
            v += _setting(a.tau)
            m *= a.server_learning_rate
            m /= v
            return m


def _setting(value: float | None) -> float:
    """Returns a setting that `resolve` always fills in for the strategy."""
    if value is None:
        raise ValueError("a setting of the strategy is missing; make settings with Aggregation.resolve")
    return value
