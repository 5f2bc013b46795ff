"""The package `duel`: the rules of the game, and an opponent from auxiliary weights that stays as it is."""

import numpy as np
import pytest

from support.digits_reference import random_key
from support.experience_harness import ExperienceModule, Mesh
from support.experience_packages import PACKAGES
from support.experience_reference import Array, Episode, Policy, decode, log_softmax, random_float, unit_key
from support.packages import load_script, manifest
from support.wasm_harness import EVALUATE, PLAY, ModuleError

FACTS = PACKAGES["duel"]
SEED = 3
WIDTH, PADDLE, FASTEST, STEEPEST = 1.5, 0.1, 0.09, 0.06
MOVES = (0.0, 0.03, -0.03)
OPPONENT = (FACTS.path / "opponent.bin").read_bytes()
BAD_ARGUMENT, BAD_DATA, BAD_STATE = -1, -2, -3


@pytest.fixture(scope="module")
def module() -> ExperienceModule:
    """A module with the weights of round 0 and the package's opponent."""
    made = ExperienceModule(FACTS.path, {"seed": SEED})
    made.check("initialize", SEED)
    return made


@pytest.fixture(scope="module")
def games(module: ExperienceModule) -> list[Episode]:
    """Sixty games of a learner that moves almost at random."""
    module.check("initialize", SEED)
    return decode(module.play(0, 60), FACTS.stored)


def court(observations: Array) -> Array:
    """Observations in lengths: across, height, speed across, speed upwards, left paddle, right paddle."""
    o = observations.astype(np.float64)
    scaled = [(o[:, 0] + 1) * WIDTH / 2, (o[:, 1] + 1) / 2, o[:, 2] * FASTEST, o[:, 3] * STEEPEST]
    return np.column_stack([*scaled, (o[:, 4] + 1) / 2, (o[:, 5] + 1) / 2])


# ---- Rules --------------------------------------------------------------------------------------


def test_ball_flies_by_the_rules(games: list[Episode]) -> None:
    """Between hits and points the ball flies straight and bounces off the sides; a hit returns it quicker."""
    hits = 0
    for game in games[:20]:
        states = court(game.observations)
        for now, after, reward in zip(states[:-1], states[1:], game.rewards, strict=True):
            height, rising = now[1] + now[3], now[3]
            if not 0 <= height <= 1:
                height, rising = (-height if height < 0 else 2 - height), -rising
            if reward:
                assert after[0] == pytest.approx(WIDTH / 2)
                assert abs(after[2]) == pytest.approx(0.03, abs=1e-6)
                continue
            assert after[1] == pytest.approx(height, abs=1e-5)
            across = now[0] + now[2]
            if 0 < across < WIDTH:
                np.testing.assert_allclose(after[[0, 2, 3]], [across, now[2], rising], atol=1e-5)
                continue
            hits += 1
            paddle, line = (after[4], 0) if across <= 0 else (after[5], WIDTH)
            assert abs(height - paddle) <= PADDLE + 1e-5
            assert after[0] == pytest.approx(2 * line - across, abs=1e-5)
            assert after[2] == pytest.approx(-np.sign(now[2]) * min(abs(now[2]) * 1.1, FASTEST), abs=1e-5)
            assert after[3] == pytest.approx((height - paddle) / PADDLE * STEEPEST, abs=1e-5)

    assert hits > 20


def test_points_are_what_passes_a_paddle(games: list[Episode]) -> None:
    """A ball past the learner's line and paddle is -1, past the opponent's 1; three end the game."""
    for game in games:
        states = court(game.observations)
        for t in np.flatnonzero(game.rewards):
            across, height = states[t][0] + states[t][2], states[t][1] + states[t][3]
            height = -height if height < 0 else 2 - height if height > 1 else height
            paddle = states[t + 1][4 if game.rewards[t] < 0 else 5]
            assert across <= 1e-5 if game.rewards[t] < 0 else across >= WIDTH - 1e-5
            assert abs(height - paddle) >= PADDLE - 1e-5
        points = ((game.rewards == 1).sum(), (game.rewards == -1).sum())
        assert max(points) <= 3
        assert (game.end == 1) == (max(points) == 3)
        assert game.rewards[-1] != 0 or len(game.actions) == 1000


def test_paddles_move_as_they_are_told(games: list[Episode]) -> None:
    """0 stays, 1 goes up, 2 goes down, by 0.03, and no paddle leaves the court."""
    for game in games:
        paddle = court(game.observations)[:, 4]
        moved = paddle[:-1] + np.array([MOVES[action] for action in game.actions])

        np.testing.assert_allclose(paddle[1:], np.clip(moved, PADDLE, 1 - PADDLE), atol=1e-6)


def test_metrics_tell_games_won(module: ExperienceModule, games: list[Episode]) -> None:
    """`return` is points won minus lost, `success` the share of games with more won."""
    module.check("initialize", SEED)
    module.play(0, 60)
    totals = np.array([game.rewards.sum() for game in games])
    found = module.named_metrics()

    assert found["return"] == totals.mean()
    assert found["success"] == (totals > 0).mean()


# ---- The opponent -------------------------------------------------------------------------------


def test_opponent_plays_its_weights(games: list[Episode]) -> None:
    """The opponent's moves are those that its policy, seen from the right, and its random numbers pick."""
    policy, weights = Policy.of(FACTS.path), np.frombuffer(OPPONENT, "<f4").astype(np.float64)
    for game in games[:10]:
        seen = game.observations[:-1].astype(np.float64) * (-1, 1, -1, 1, 1, 1)
        sums = np.exp(log_softmax(policy.forward(weights, seen[:, [0, 1, 2, 3, 5, 4]], "actor")[2])).cumsum(
            axis=1
        )
        key = random_key(random_key(unit_key(SEED, game.unit), 0), 2)
        drawn = np.array([random_float(key, t) for t in range(len(sums))])
        clear = np.abs(sums - drawn[:, None]).min(axis=1) > 1e-5
        picked = (drawn[:, None] >= sums[:, :-1]).sum(axis=1)
        paddle = court(game.observations)[:, 5]
        moved = np.clip(paddle[:-1] + np.array(MOVES)[picked], PADDLE, 1 - PADDLE)

        assert clear.mean() > 0.99
        np.testing.assert_allclose(paddle[1:][clear], moved[clear], atol=1e-6)


def test_play_needs_the_opponent() -> None:
    """Without it, PLAY and EVALUATE fail and name it; predictions and weights don't need it."""
    bare = ExperienceModule(FACTS.path, auxiliary=False)
    bare.check("initialize", SEED)
    for phase in (PLAY, EVALUATE):
        with pytest.raises(ModuleError, match="`opponent`") as caught:
            bare.check("begin", phase, 0, 1)
        assert caught.value.status == BAD_STATE

    assert len(bare.predict(bytes(24), 12)) == 12


@pytest.mark.parametrize(
    ("index", "data", "status", "words"),
    [
        (1, OPPONENT, BAD_ARGUMENT, "has one"),
        (-1, OPPONENT, BAD_ARGUMENT, "has one"),
        (0, b"", BAD_DATA, "these are 0 bytes"),
        (0, OPPONENT[:-4], BAD_DATA, "these are 37900 bytes"),
        (0, OPPONENT + bytes(4), BAD_DATA, "these are 37908 bytes"),
        (0, OPPONENT[:-4] + b"\0\0\xc0\x7f", BAD_DATA, "weight 9475"),
        (0, b"\0\0\x80\xff" + OPPONENT[4:], BAD_DATA, "weight 0"),
    ],
)
def test_what_is_no_opponent_is_refused(index: int, data: bytes, status: int, words: str) -> None:
    """A wrong place, a wrong size and weights that aren't numbers are errors that say what was expected."""
    bare = ExperienceModule(FACTS.path, auxiliary=False)
    with pytest.raises(ModuleError, match=words) as caught:
        bare.load_auxiliary(index, data)

    assert caught.value.status == status
    assert bare.call("begin", PLAY, 0, 1) == BAD_STATE


def test_opponent_is_never_trained(module: ExperienceModule) -> None:
    """It outlives configurations and updates as it came: later play meets the same one."""
    module.check("initialize", SEED)
    base, record = module.all_weights(), module.play(0, 4)
    module.update(record, 0)
    assert module.all_weights().tobytes() != base.tobytes()
    module.setting(seed=SEED)
    module.set_weights(base)

    assert module.play(0, 4) == record


def test_another_opponent_is_another_game(module: ExperienceModule) -> None:
    """The weights handed over decide how the games go, and handing over others replaces them."""
    module.check("initialize", SEED)
    record = module.play(0, 4)
    module.load_auxiliary(0, bytes(len(OPPONENT)))
    other = module.play(0, 4)
    module.load_auxiliary(0, OPPONENT)

    assert other != record
    assert module.play(0, 4) == record


def test_update_needs_no_opponent(module: ExperienceModule) -> None:
    """What was played is in the record: learning from it gives the same weights without the opponent."""
    module.check("initialize", SEED)
    base, record = module.all_weights(), module.play(0, 2)
    module.update(record, 0)
    bare = ExperienceModule(FACTS.path, {"seed": SEED}, auxiliary=False)
    bare.set_weights(base)
    bare.update(record, 0)

    assert bare.all_weights().tobytes() == module.all_weights().tobytes()


def test_opponent_is_better_than_chance(games: list[Episode]) -> None:
    """Against almost random moves it wins by more than a point a game: there is something to learn."""
    assert np.mean([game.rewards.sum() for game in games]) < -1
    assert manifest(FACTS.path)["auxiliaryWeights"][0]["name"] == "opponent"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_opponent_is_what_its_script_makes() -> None:
    """tools/make_opponent.py makes the package's auxiliary file, byte for byte."""
    assert load_script(FACTS.path / "tools" / "make_opponent.py").train(16) == OPPONENT


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_learns_to_hold_its_own() -> None:
    """Rounds of 8 x 16 games turn defeat by two points a game into a draw within 24 rounds."""
    module = ExperienceModule(FACTS.path, {"seed": 1})
    module.check("initialize", 1)
    mesh, curve = Mesh(module, assignments=8, units=16), [module.evaluate()["return"] or 0]
    while curve[-1] < 0 and len(curve) <= 24:
        mesh.round()
        curve.append(module.evaluate()["return"] or 0)

    assert curve[0] < -1.5, curve
    assert curve[-1] >= 0, curve
