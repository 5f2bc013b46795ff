"""What the GPU half must know about a package: plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from covey.v1 import package_pb2

OWN_FIELDS = ("batchSize", "learningRate", "localEpochs")
"""Hyperparameters with fields of their own in a configuration; all others are the model's."""


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


def package_facts(
    manifest: package_pb2.ModelPackage,
    *,
    batch_size: int,
    learning_rate: float,
    local_epochs: int,
    hyperparameters: Sequence[float],
) -> PackageFacts:
    """Returns the facts of a manifest under the settings of a job.

    Args:
        hyperparameters: the model's own, in manifest order, as `covey_configure` gets them.
    """
    own = [item.name for item in manifest.hyperparameters if item.name not in OWN_FIELDS]
    return PackageFacts(
        parameters={item.name: prod(item.shape) for item in manifest.parameters},
        hyperparameters={
            **dict(zip(own, hyperparameters, strict=True)),
            "batchSize": float(batch_size),
            "learningRate": learning_rate,
            "localEpochs": float(local_epochs),
        },
        metrics=len(manifest.metrics),
        training=manifest.capabilities.training,
        evaluation=manifest.capabilities.evaluation,
        experience=manifest.work_source.kind == package_pb2.WorkSource.EXPERIENCE,
    )
