"""How the experience packages learn: the same as PPO in plain NumPy, and the derivative of its loss."""

from collections.abc import Iterable

import numpy as np
import pytest

from support.digits_reference import random_key
from support.experience_harness import ExperienceModule
from support.experience_packages import PACKAGES, Facts
from support.experience_reference import (
    Array,
    Batch,
    Episode,
    Policy,
    Settings,
    decode,
    epoch_order,
    gradient,
    grid_shaped,
    log_softmax,
    losses,
    prepare,
    random_float,
    total_loss,
    unit_key,
    update,
)

SEED, FIRST = 7, 300
# Far from the defaults, so that every term of the loss counts.
OTHER = {
    "discount": 0.93,
    "trace": 0.8,
    "clip": 0.1,
    "entropyWeight": 0.05,
    "valueWeight": 0.7,
    "gradientNorm": 0.3,
}


@pytest.fixture(params=list(PACKAGES))
def facts(request: pytest.FixtureRequest) -> Facts:
    """Each package in turn."""
    found: Facts = PACKAGES[request.param]
    return found


def settings_of(facts: Facts, **changes: float) -> Settings:
    """The reference's settings for OTHER."""
    values = {"batch": 48, "rate": 0.003, "epochs": 3} | changes
    return Settings(
        batch=int(values["batch"]),
        rate=values["rate"],
        epochs=int(values["epochs"]),
        discount=OTHER["discount"],
        trace=OTHER["trace"],
        clip=OTHER["clip"],
        entropy_weight=OTHER["entropyWeight"],
        value_weight=OTHER["valueWeight"],
        gradient_norm=values.get("norm", OTHER["gradientNorm"]),
        reward_scale=facts.reward_scale,
    )


def played(facts: Facts, units: int, **changes: float) -> tuple[ExperienceModule, bytes, list[Episode]]:
    """A module with a policy that isn't uniform any more, a record of its play, and that decoded."""
    module = ExperienceModule(facts.path, {"seed": SEED, **OTHER, **changes})
    module.check("initialize", SEED)
    weights = module.all_weights()
    noise = np.random.default_rng(4).standard_normal(weights.size).astype(np.float32)
    module.set_weights(weights + np.float32(0.05) * noise)
    record = module.play(FIRST, units)
    return module, record, decode(record, facts.stored, facts.observe)


def learnt_rewards(facts: Facts, episodes: Iterable[Episode], weight: float) -> list[Array] | None:
    """Shaped rewards where the package shapes them."""
    if facts is not PACKAGES["gridworld"]:
        return None
    return [grid_shaped(episode, OTHER["discount"], weight) for episode in episodes]


def test_actions_are_drawn_from_the_policy(facts: Facts) -> None:
    """Each action is the one that its unit's random number picks, and its logarithm is the policy's."""
    module, _, episodes = played(facts, 3)
    policy, weights = Policy.of(facts.path), module.all_weights().astype(np.float64)
    for episode in episodes:
        key = random_key(unit_key(SEED, episode.unit), 1)
        logs = log_softmax(policy.forward(weights, episode.observations[:-1].astype(np.float64), "actor")[2])
        sums = np.exp(logs).cumsum(axis=1)
        drawn = np.array([random_float(key, t) for t in range(len(logs))])
        clear = np.abs(sums - drawn[:, None]).min(axis=1) > 1e-6

        picked = (drawn[:, None] >= sums[:, :-1]).sum(axis=1)

        np.testing.assert_array_equal(picked[clear], episode.actions[clear])
        of_action = np.take_along_axis(logs, episode.actions[:, None], 1)[:, 0]
        np.testing.assert_allclose(episode.log_probabilities, of_action, atol=2e-6)


def test_update_is_numpys(facts: Facts) -> None:
    """Values, advantages, shuffles, losses, clipping and Adam: three passes change the weights as NumPy's do.

    NumPy computes in f64. Weights change by up to 0.05 and differ by 2e-6 at most.
    """
    shaping = {"shaping": 0.5} if facts is PACKAGES["gridworld"] else {}
    changes = {"batchSize": 48, "learningRate": 0.003, "localEpochs": 3} | shaping
    module, record, episodes = played(facts, 3, **changes)
    base = module.all_weights()
    module.update(record, FIRST)
    policy, settings, flat = Policy.of(facts.path), settings_of(facts), base.astype(np.float64)
    batch = prepare(policy, flat, episodes, settings, learnt_rewards(facts, episodes, 0.5))
    orders = [epoch_order(SEED, FIRST, epoch, len(batch.actions)) for epoch in range(3)]
    update(policy, flat, batch, settings, orders)

    assert len(batch.actions) > 40
    assert abs(flat - base).max() > 0.005
    np.testing.assert_allclose(module.all_weights(), flat, atol=5e-6)


def one_step(facts: Facts) -> tuple[Array, Array, Batch, Settings]:
    """The gradient of the module's first step, at the weights where it is taken, and what it is taken on.

    Adam's first step is rate * s / (|s| + 1e-5) for a gradient s, here of norm 0.001: solved for s.
    The ratio is moved away from 1 by weights other than those that played, so that clipping binds for some.
    """
    module, record, episodes = played(facts, 2, batchSize=8192, learningRate=1.0, localEpochs=1)
    moved = module.all_weights()
    moved += np.random.default_rng(5).standard_normal(moved.size).astype(np.float32) * np.float32(0.03)
    module.set_weights(moved)
    module.setting(
        seed=SEED,
        **(OTHER | {"gradientNorm": 0.001}),
        batchSize=8192,
        learningRate=1.0,
        localEpochs=1,
    )
    module.update(record, FIRST)
    step = moved.astype(np.float64) - module.all_weights()
    settings = settings_of(facts, batch=8192, rate=1.0, epochs=1, norm=0.001)
    flat = moved.astype(np.float64)
    batch = prepare(Policy.of(facts.path), flat, episodes, settings, learnt_rewards(facts, episodes, 0.0))
    return 1e-5 * step / (1 - abs(step)), flat, batch, settings


def test_gradient_is_the_derivative_of_the_loss(facts: Facts) -> None:
    """The module's gradient is back-propagation's in f64, and that is the loss's finite differences.

    The former over all weights, at norm 0.001, where single derivatives are around 1e-5; the latter on some
    weights of each tensor and 60 of the steps.
    """
    found, flat, batch, settings = one_step(facts)
    policy = Policy.of(facts.path)
    exact = gradient(policy, flat, batch, settings)
    scale = 0.001 / np.sqrt((exact**2).sum())
    chooser, at, chosen = np.random.default_rng(3), 0, []
    for shape in policy.shapes.values():
        size = int(np.prod(shape))
        chosen += [at + int(pick) for pick in chooser.choice(size, min(size, 8), replace=False)]
        at += size
    some, differences = batch.pick(np.arange(len(batch.actions))[:: 1 + len(batch.actions) // 60]), []
    for index in chosen:
        sides = []
        for change in (1e-6, -1e-6):
            there = flat.copy()
            there[index] += change
            sides.append(total_loss(policy, there, some, settings))
        differences.append((sides[0] - sides[1]) / 2e-6)
    clipped = losses(policy, flat, batch, settings)["clipped"].mean()

    assert 0.02 < clipped < 0.98
    np.testing.assert_allclose(
        gradient(policy, flat, some, settings)[chosen], differences, atol=1e-8, rtol=1e-5
    )
    np.testing.assert_allclose(found, exact * scale, atol=2e-9, rtol=2e-3)


def test_metrics_of_an_update_are_the_losses(facts: Facts) -> None:
    """With one minibatch and one pass, every metric is the mean of NumPy's losses before learning."""
    module, record, episodes = played(facts, 2, batchSize=8192, localEpochs=1)
    flat = module.all_weights().astype(np.float64)
    settings, policy = settings_of(facts), Policy.of(facts.path)
    batch = prepare(policy, flat, episodes, settings, learnt_rewards(facts, episodes, 0.0))
    found = module.update(record, FIRST)

    for name, values in losses(policy, flat, batch, settings).items():
        value = found[name]
        assert value is not None
        np.testing.assert_allclose(value, values.mean(), atol=2e-6, err_msg=name)


def test_time_limit_is_no_end(facts: Facts) -> None:
    """What follows an episode that the limit cut is worth what the critic says of it; an end is worth 0."""
    module, record, episodes = played(facts, 1, batchSize=8192, localEpochs=1)
    cut = episodes[0]
    steps = facts.steps_most
    rows = [cut.stored[i % len(cut.stored)] for i in range(steps + 1)]
    rewards = np.resize(cut.rewards, steps).astype("<f4")
    logs = np.resize(cut.log_probabilities, steps).astype("<f4")
    actions = np.resize(cut.actions, steps).astype(np.uint8).tobytes()
    body = b"".join(rows) + rewards.tobytes() + logs.tobytes() + actions + bytes(-steps % 4)
    flat, policy, found = module.all_weights().astype(np.float64), Policy.of(facts.path), []
    for end in (1, 2):
        head = record[:4] + (24 + len(body)).to_bytes(4, "little") + record[8:16]
        made = head + steps.to_bytes(4, "little") + end.to_bytes(4, "little") + body
        episode = decode(made, facts.stored, facts.observe)
        batch = prepare(policy, flat, episode, settings_of(facts), learnt_rewards(facts, episode, 0.0))
        module.set_weights(flat.astype(np.float32))
        expected = losses(policy, flat, batch, settings_of(facts))["valueLoss"].mean()
        found.append(module.update(made, FIRST)["valueLoss"])
        assert found[-1] == pytest.approx(expected, rel=1e-4)

    assert found[0] != found[1]
