"""The experience packages by name, with what tests must know of each."""

from dataclasses import dataclass
from pathlib import Path

from support.experience_reference import Observe, observe_floats, observe_grid
from support.packages import MODELS


@dataclass(frozen=True)
class Facts:
    """Attributes.

    path: the package's folder.
    stored: bytes of an observation in a record.
    steps_most: steps after which an episode is cut.
    reward_scale: what rewards are multiplied by for the critic.
    """

    path: Path
    stored: int
    steps_most: int
    reward_scale: float
    observe: Observe = observe_floats


PACKAGES = {
    "cartpole": Facts(MODELS / "cartpole", 16, 500, 0.05),
    "gridworld": Facts(MODELS / "gridworld", 12, 100, 1.0, observe_grid),
    "duel": Facts(MODELS / "duel", 24, 1000, 1.0),
}
