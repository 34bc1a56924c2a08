"""A router's metrics at some moments: rates between two of them, and quantiles of histograms."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Metrics", "quantile", "read_metrics"]

PREFIX = "microserve_router_"
Labels = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Metrics:
    """Values by the name of the sample, without its prefix, and its labels."""

    values: dict[str, dict[Labels, float]] = field(default_factory=lambda: defaultdict(dict))

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of all samples that have these labels."""
        wanted = labels.items()
        found = self.values.get(name, {})
        return sum(value for own, value in found.items() if wanted <= dict(own).items())

    def buckets(self, name: str) -> dict[float, float]:
        """Return a histogram over all its labels: how many values are at most the key."""
        counts: dict[float, float] = defaultdict(float)
        for labels, value in self.values.get(f"{name}_bucket", {}).items():
            counts[float(dict(labels)["le"])] += value
        return dict(sorted(counts.items()))


def read_metrics(text: str) -> Metrics:
    """Read the Prometheus text of a router. Raises `ValueError` or `KeyError`."""
    metrics = Metrics()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                if sample.name.endswith("_bucket"):
                    float(sample.labels["le"])  # `Metrics.buckets` depends on it
                labels = tuple(sorted(sample.labels.items()))
                metrics.values[sample.name.removeprefix(PREFIX)][labels] = sample.value
    return metrics


def quantile(share: float, now: dict[float, float], before: dict[float, float]) -> float | None:
    """Estimate a quantile of the values that came in between, as Prometheus does.

    `None` without any. Within a bucket, values are taken to be spread evenly; beyond the last
    bound, they are taken to be at it.
    """
    counts = [(bound, max(count - before.get(bound, 0.0), 0.0)) for bound, count in now.items()]
    if not counts or not counts[-1][1]:
        return None
    rank = share * counts[-1][1]
    lower, below = 0.0, 0.0
    for bound, count in counts:
        if count >= rank and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = (lower if math.isinf(bound) else bound), count
    return lower
