"""What the GPU half must know about a package and about a device: plain data, without a proto or a driver."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from covey.v1 import common_pb2, package_pb2

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


@dataclass(frozen=True)
class AdapterFacts:
    """One adapter.

    Attributes:
        name: as the driver gives it.
        adapter_type: `DiscreteGPU`, `IntegratedGPU`, `CPU` (software) or what the driver says.
        api: `Vulkan`, `Metal`, `D3D12`, …
        driver: the driver's description of itself.
        limits: WebGPU limits by hyphenated name.
        features: WebGPU feature names.
    """

    name: str
    adapter_type: str
    api: str
    driver: str = ""
    limits: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()

    @property
    def shares_memory(self) -> bool:
        """Whether its buffers lie in the machine's own memory."""
        return self.adapter_type in ("CPU", "IntegratedGPU")

    def lacking_limits(self, required: Mapping[str, int]) -> list[str]:
        """Returns a sentence for each limit that is below what is required; unknown names count as missing.

        Limits named `min-…` are alignments, where less is better.
        """
        lacking = []
        for name, wanted in sorted(required.items()):
            found = self.limits.get(name)
            if found is None:
                lacking.append(f"{name}: expected {wanted}, this adapter has no such limit")
            elif found > wanted if name.startswith("min-") else found < wanted:
                lacking.append(f"{name}: expected {wanted}, this adapter has {found}")
        return lacking

    def lacking_features(self, required: Sequence[str]) -> list[str]:
        """Returns the features that it doesn't have."""
        return sorted(set(required) - self.features)


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


def requirements(manifest: package_pb2.ModelPackage) -> tuple[dict[str, int], list[str]] | None:
    """Returns the limits and features that the package's GPU_WGPU backend requires; None: it has none."""
    for backend in manifest.backends:
        if backend.kind == common_pb2.GPU_WGPU:
            return dict(backend.requires.limits), list(backend.requires.features)
    return None
