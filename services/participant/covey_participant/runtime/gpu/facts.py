"""What the GPU half must know about a package: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass

from covey_participant.domain.values import Config, GpuNeeds, Package


@dataclass(frozen=True)
class PackageFacts:
    """What a plan is checked against and run with.

    Attributes:
        parameters: elements of each parameter by name, in manifest order.
        hyperparameters: the values in force, by name; `batchSize`, `learningRate`, `localEpochs` always.
        metrics: number of metrics.
        training, evaluation: the manifest's capabilities.
        experience: the package plays its own units, and updates from them.
    """

    parameters: Mapping[str, int]
    hyperparameters: Mapping[str, float]
    metrics: int
    training: bool = True
    evaluation: bool = True
    experience: bool = False

    @property
    def batch_size(self) -> int:
        """Units of one minibatch."""
        return int(self.hyperparameters["batchSize"])


def package_facts(package: Package, config: Config) -> PackageFacts:
    """Returns the facts of a package under the settings of an assignment."""
    needs = package.gpu or GpuNeeds()
    return PackageFacts(
        parameters=dict(needs.parameters),
        hyperparameters={
            **dict(zip(needs.hyperparameters, config.hyperparameters, strict=True)),
            "batchSize": float(config.batch_size),
            "learningRate": config.learning_rate,
            "localEpochs": float(config.local_epochs),
        },
        metrics=len(package.metrics),
        training=package.training,
        evaluation=package.evaluation,
        experience=package.experience,
    )
