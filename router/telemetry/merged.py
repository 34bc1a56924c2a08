"""Metrics of several processes as those of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

__all__ = ["Family", "Samples", "counters", "merged", "render", "samples_of"]

# Gauges that are sums; of the others, the processes see the same, and the largest value counts.
SUMMED = frozenset(
    [
        *(
            f"microserve_router_{name}"
            for name in ("connections", "requests_in_flight", "requests_waiting", "engine_load")
        ),
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
        "process_open_fds",
    ]
)


class Family(Struct, frozen=True, array_like=True):
    """A metric: each value by the name and the labels of its sample."""

    name: str
    help: str
    kind: str
    values: list[tuple[str, dict[str, str], float]]


Samples = list[Family]


def samples_of(registry: CollectorRegistry) -> Samples:
    """Return the metrics of a registry."""
    return [
        Family(
            one.name, one.documentation, one.type,
            [(sample.name, dict(sample.labels), sample.value) for sample in one.samples],
        )
        for one in registry.collect()
    ]  # fmt: skip


def merged(parts: Iterable[Samples]) -> Samples:
    """Add up the metrics of several processes."""
    families: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for part in parts:
        for family in part:
            families.setdefault(family.name, family)
            known = values.setdefault(family.name, {})
            largest = family.kind == "gauge" and family.name not in SUMMED
            for name, labels, value in family.values:
                key = (name, tuple(labels.items()))
                old = known.get(key)
                known[key] = value if old is None else max(old, value) if largest else old + value
    return [
        Family(
            name, family.help, family.kind,
            [(sample, dict(labels), value) for (sample, labels), value in values[name].items()],
        )
        for name, family in families.items()
    ]  # fmt: skip


def counters(samples: Samples) -> Samples:
    """Return what of the metrics of a process remains when it has ended."""
    return [family for family in samples if family.kind in ("counter", "histogram", "summary")]


def render(samples: Samples) -> bytes:
    """Return metrics in the Prometheus text format."""
    return generate_latest(_Collected(samples))


class _Collected(Collector):
    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def collect(self) -> Iterator[Metric]:
        for family in self._samples:
            metric = Metric(family.name, family.help, family.kind)
            for name, labels, value in family.values:
                metric.add_sample(name, labels, value)
            yield metric
