"""Values of the coordinator's domain."""

from covey_coordinator.domain.aggregation import Aggregation, Strategy
from covey_coordinator.domain.spec import ChunkOrder, Settings


def settings(
    *,
    seed: int = 0,
    per_round: int = 8,
    epochs: int | None = 1,
    target: int | None = None,
    order: ChunkOrder = ChunkOrder.SEEDED,
    interval: int = 0,
) -> Settings:
    """Settings in which only the plan's own matter."""
    return Settings(
        epochs=epochs,
        target_round=target,
        assignments_per_round=per_round,
        seed=seed,
        batch_size=1,
        learning_rate=0.1,
        local_epochs=1,
        hyperparameters=(),
        chunk_order=order,
        aggregation=Aggregation.resolve(Strategy.FED_AVG),
        min_participants=1,
        validation_interval=interval,
        silence_timeout=15.0,
        assignment_timeout=600.0,
    )
