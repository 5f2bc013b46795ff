"""The coordinator's memory for a model of 100 MB: a few copies of the weights, however many devices push."""

from pathlib import Path

import pytest

from support.coordinator_memory import measure

WEIGHTS = 25_000_000
"""100 MB of f32."""


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_memory_does_not_grow_with_participants(tmp_path: Path) -> None:
    """At most 6 × the weights above idle, and 8 devices at most 1.2 × what 2 need (FedAdam)."""
    few = await measure(tmp_path / "few", 2, count=WEIGHTS)
    many = await measure(tmp_path / "many", 8, count=WEIGHTS)

    assert many.ratio <= 6, many
    assert few.ratio <= 6, few
    assert many.peak_bytes <= 1.2 * few.peak_bytes, (few, many)
