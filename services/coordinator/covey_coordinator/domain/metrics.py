"""Metrics: checked where they come in, merged where rounds end."""

import math
from collections.abc import Iterable, Sequence

from covey_coordinator.domain.model import Metric

__all__ = ["merge", "metric_problems"]


def metric_problems(names: Sequence[str], metrics: Sequence[Metric]) -> list[str]:
    """Says everything that is wrong with reported metrics; `names` are the manifest's."""
    problems = []
    given = [metric.name for metric in metrics]
    missing = [name for name in names if name not in given]
    unknown = sorted({name for name in given if name not in names})
    twice = sorted({name for name in given if given.count(name) > 1})
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if unknown:
        problems.append(f"unknown: {', '.join(unknown)} (the manifest has {', '.join(names) or 'none'})")
    if twice:
        problems.append(f"given twice: {', '.join(twice)}")
    for metric in metrics:
        if metric.sum is not None and not math.isfinite(metric.sum):
            problems.append(f"{metric.name}: the sum is {metric.sum}, expected a finite number")
        if not (math.isfinite(metric.count) and metric.count >= 0):
            problems.append(f"{metric.name}: the count is {metric.count}, expected a finite number from 0")
    return problems


def merge(names: Sequence[str], reports: Iterable[Sequence[Metric]]) -> tuple[Metric, ...]:
    """Adds up reports in the order given, each metric by its own count, in f64.

    A metric that nobody measured stays absent (`sum` None, count 0); a report without a sum adds
    nothing; a sum that leaves the f64 range isn't known any more. The result is in the order of `names`.
    """
    sums: dict[str, float] = {}
    counts: dict[str, float] = {}
    for report in reports:
        for metric in report:
            if metric.sum is None:
                continue
            sums[metric.name] = sums.get(metric.name, 0.0) + metric.sum
            counts[metric.name] = counts.get(metric.name, 0.0) + metric.count
    merged = []
    for name in names:
        total = sums.get(name)
        known = total if total is not None and math.isfinite(total) else None
        merged.append(Metric(name, known, counts.get(name, 0.0)))
    return tuple(merged)
