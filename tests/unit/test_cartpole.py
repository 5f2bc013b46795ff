"""The package `cartpole`: Gymnasium's dynamics step for step, and a policy that learns to balance."""

import math
from typing import Any

import gymnasium
import numpy as np
import pytest

from support.digits_reference import random_bits, random_key
from support.experience_harness import ExperienceModule, Mesh
from support.experience_packages import PACKAGES
from support.experience_reference import EVALUATION_SEED, Array, Episode, Policy, decode, unit_key

PACKAGE = PACKAGES["cartpole"].path
SEED = 11


def weigh(module: ExperienceModule, gains: tuple[float, float, float, float], sureness: float) -> None:
    """Sets weights by which the push follows the sign of a weighted sum of the state, however surely."""
    flat = np.zeros(module.count, np.float32)
    parts = Policy.of(PACKAGE).split(flat)
    parts["actor.hidden1.weight"][:, 0] = gains
    parts["actor.hidden2.weight"][0, 0] = 4
    parts["actor.output.weight"][1, 0] = sureness
    module.set_weights(flat)


@pytest.fixture(scope="module")
def balancing() -> ExperienceModule:
    """A module whose policy balances well, though not always."""
    module = ExperienceModule(PACKAGE, {"seed": SEED})
    weigh(module, (0.1, 0.2, 2.0, 1.0), 6.0)
    return module


@pytest.fixture
def gym() -> Any:
    """Gymnasium's own environment, with its time limit."""
    made = gymnasium.make("CartPole-v1")
    made.reset(seed=0)
    return made


def first_state(unit: int, seed: int = SEED) -> Array:
    """The state that a unit begins with, in f64."""
    key = random_key(unit_key(seed, unit), 0)
    return np.array([-0.05 + 0.1 * ((random_bits(key, i) >> 11) * 2.0**-53) for i in range(4)])


def sine(x: float) -> float:
    """The module's own: Taylor's series to the 13th power."""
    z, p = x * x, 1 / 6227020800
    for term in (-39916800, 362880, -5040, 120, -6):
        p = p * z + 1 / term
    return x + x * (z * p)


def cosine(x: float) -> float:
    """The module's own: Taylor's series to the 12th power."""
    z, p = x * x, 1 / 479001600
    for term in (-3628800, 40320, -720, 24):
        p = p * z + 1 / term
    half = 0.5 * z
    near = 1 - half
    return near + ((1 - near - half) + z * z * p)


def step(state: Array, action: int) -> Array:
    """The module's step in Python, in the same order of f64 operations."""
    x, x_dot, theta, theta_dot = (float(value) for value in state)
    total, length = 0.1 + 1.0, 0.5
    pole = 0.1 * length
    force = 10.0 if action == 1 else -10.0
    push = (force + pole * (theta_dot * theta_dot) * sine(theta)) / total
    cos = cosine(theta)
    theta_acc = (9.8 * sine(theta) - cos * push) / (length * (4.0 / 3.0 - 0.1 * (cos * cos) / total))
    x_acc = push - pole * theta_acc * cos / total
    moved = (x + 0.02 * x_dot, x_dot + 0.02 * x_acc, theta + 0.02 * theta_dot, theta_dot + 0.02 * theta_acc)
    return np.array(moved)


def test_trigonometry_is_within_one_unit_in_the_last_place() -> None:
    """Where steps are taken, below 0.3, the series are libm's sine and cosine to a unit in the last place."""
    angles = np.linspace(-0.3, 0.3, 20001)

    for ours, exact in ((sine, math.sin), (cosine, math.cos)):
        worst = max(abs(ours(x) - exact(x)) / math.ulp(exact(x)) for x in angles)
        assert worst <= 1


def test_short_episodes_are_gymnasiums(gym: Any) -> None:
    """From the same first state, the recorded actions lead Gymnasium through the same episode to its end.

    The pole is unstable: a difference in the last place of f64 grows by e in a quarter of a second. These
    episodes last a second or so, and then the observations still agree to 1e-6.
    """
    module = ExperienceModule(PACKAGE, {"seed": SEED})
    module.check("initialize", SEED)
    for episode in decode(module.play(0, 40), 16):
        gym.reset(seed=0)
        gym.unwrapped.state = first_state(episode.unit)
        np.testing.assert_array_equal(episode.observations[0], first_state(episode.unit).astype(np.float32))
        for t, action in enumerate(episode.actions):
            seen, reward, terminated, truncated, _ = gym.step(int(action))

            np.testing.assert_allclose(episode.observations[t + 1], seen, atol=1e-6)
            assert episode.rewards[t] == reward
            assert terminated == (t + 1 == len(episode.actions))
            assert not truncated
        assert episode.end == 1


def follow(episode: Episode, gym: Any, seed: int) -> float:
    """Follows an episode in f64; returns the greatest difference of one step from Gymnasium's."""
    state, worst = first_state(episode.unit, seed), 0.0
    for t, action in enumerate(episode.actions):
        np.testing.assert_array_equal(episode.observations[t], state.astype(np.float32))
        gym.unwrapped.state, gym.unwrapped.steps_beyond_terminated = state, None
        _, reward, terminated, _, _ = gym.unwrapped.step(int(action))
        state = step(state, int(action))
        worst = max(worst, float(np.abs(state - gym.unwrapped.state).max()))
        assert reward == episode.rewards[t] == 1
        assert terminated == (t + 1 == len(episode.actions) and episode.end == 1)
    np.testing.assert_array_equal(episode.observations[-1], state.astype(np.float32))
    return worst


def test_every_step_is_gymnasiums(balancing: ExperienceModule, gym: Any) -> None:
    """Over long episodes, each single step from the module's exact state is Gymnasium's to 1e-15.

    The state in f64 is followed in Python with the module's own series; every f32 observation of the record
    is that state's, bit for bit.
    """
    episodes = decode(balancing.play(500, 12), 16)

    assert sum(len(episode.actions) for episode in episodes) > 600
    for episode in episodes:
        assert follow(episode, gym, SEED) < 1e-15


def test_limits_are_gymnasiums(gym: Any) -> None:
    """500 steps an episode; bounds, forces and times are those that Gymnasium has."""
    bare = gym.unwrapped

    assert gym.spec.max_episode_steps == PACKAGES["cartpole"].steps_most == 500
    assert (bare.force_mag, bare.tau, bare.x_threshold, bare.length, bare.gravity) == (
        10,
        0.02,
        2.4,
        0.5,
        9.8,
    )
    assert bare.theta_threshold_radians == 12 * 2 * math.pi / 360
    assert bare.kinematics_integrator == "euler"


def test_time_limit_cuts_after_500_steps() -> None:
    """Who doesn't fall gets a return of 500 and an episode that was cut, not ended."""
    module = ExperienceModule(PACKAGE, {"seed": SEED})
    weigh(module, (0.1, 0.2, 2.0, 1.0), 50.0)
    episodes = decode(module.play(0, 20), 16)
    whole = [episode for episode in episodes if episode.end == 2]

    assert len(whole) > 10
    assert {len(episode.actions) for episode in whole} == {500}
    assert module.named_metrics()["return"] == np.mean([len(episode.actions) for episode in episodes])


def test_evaluation_is_greedy(balancing: ExperienceModule) -> None:
    """Evaluation takes the more probable action, from the first states of its own sequence."""
    lengths = []
    for unit in range(2):
        state, steps = first_state(unit, EVALUATION_SEED), 0
        while steps < 500 and abs(state[0]) <= 2.4 and abs(state[2]) <= 12 * 2 * math.pi / 360:
            chances = np.frombuffer(balancing.predict(state.astype("<f4").tobytes(), 8), "<f4")
            state, steps = step(state, int(chances.argmax())), steps + 1
        lengths.append(steps)

    assert balancing.evaluate(2)["length"] == np.mean(lengths)


def test_learns_in_seconds() -> None:
    """At most eight rounds of 64 episodes turn a return around 22 into one above 200 on the evaluation's."""
    module = ExperienceModule(PACKAGE, {"seed": 1})
    module.check("initialize", 1)
    mesh, curve = Mesh(module, assignments=8, units=8), [module.evaluate()["return"] or 0]
    while curve[-1] <= 200 and len(curve) <= 8:
        mesh.round()
        curve.append(module.evaluate()["return"] or 0)

    assert curve[0] < 60
    assert curve[-1] > 200, curve


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_reaches_475(seed: int) -> None:
    """Rounds of 8 x 16 episodes reach an average return of 475 within 12, and keep it to the 16th."""
    module = ExperienceModule(PACKAGE, {"seed": seed})
    module.check("initialize", seed)
    mesh, curve = Mesh(module, assignments=8, units=16), []
    for _ in range(16):
        mesh.round()
        curve.append(module.evaluate()["return"] or 0)

    assert max(curve[:12]) >= 475, curve
    assert min(curve[-3:]) >= 475, curve
