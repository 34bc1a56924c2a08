"""Counters, gauges and histograms that cost an addition, and become Prometheus's when asked for.

prometheus_client's own take a lock and a few calls each time; some fifteen of them are changed with
each request. Here everything happens on one event loop, so that a dictionary is enough.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

__all__ = ["Counter", "Gauge", "Histogram", "Series"]


class Value:
    """One number."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount

    def dec(self, amount: float = 1.0) -> None:
        self.value -= amount

    def set(self, value: float) -> None:
        self.value = value


class Distribution:
    """How many observations fell into each bucket, and their sum. `bounds` are inclusive."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


C = TypeVar("C", Value, Distribution)


class Series(ABC, Generic[C]):
    """All that has one name: a `C` for each combination of label values. Without labels it is used
    as if it were its only one."""

    def __init__(self, name: str, help: str, labels: Sequence[str]) -> None:
        self._name = name
        self._help = help
        self._labels = tuple(labels)
        self._children: dict[tuple[object, ...], C] = {}
        if not labels:
            self._children[()] = self._new()

    def labels(self, *values: object) -> C:
        """The one with these label values, in the order of the names."""
        child = self._children.get(values)
        if child is None:
            if len(values) != len(self._labels):
                raise ValueError(f"{self._name} has the labels {self._labels}, not {values}")
            child = self._children[values] = self._new()
        return child

    def remove(self, *values: object) -> None:
        self._children.pop(values, None)

    def clear(self) -> None:
        self._children.clear()

    @abstractmethod
    def collect(self) -> Iterator[Metric]:
        """As Prometheus's registry asks for it."""

    @abstractmethod
    def _new(self) -> C: ...

    def _items(self) -> Iterator[tuple[list[str], C]]:
        for values, child in self._children.items():
            yield [str(value) for value in values], child


class _Values(Series[Value]):
    """What is one number each."""

    _family: ClassVar[type[CounterMetricFamily | GaugeMetricFamily]]

    def inc(self, amount: float = 1.0) -> None:
        self._children[()].value += amount

    def collect(self) -> Iterator[Metric]:
        family = self._family(self._name, self._help, labels=self._labels)
        for values, child in self._items():
            family.add_metric(values, child.value)
        yield family

    def _new(self) -> Value:
        return Value()


class Counter(_Values):
    """It only grows."""

    _family = CounterMetricFamily


class Gauge(_Values):
    """It says how things are now."""

    _family = GaugeMetricFamily

    def dec(self, amount: float = 1.0) -> None:
        self._children[()].value -= amount

    def set(self, value: float) -> None:
        self._children[()].value = value


class Histogram(Series[Distribution]):
    """Observations by size; `buckets` are their upper bounds, rising."""

    def __init__(
        self, name: str, help: str, labels: Sequence[str], buckets: Sequence[float]
    ) -> None:
        self._buckets = tuple(buckets)
        super().__init__(name, help, labels)

    def observe(self, value: float) -> None:
        self._children[()].observe(value)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._help, labels=self._labels)
        for values, child in self._items():
            cumulated, buckets = 0, []
            for bound, count in zip([*self._buckets, float("inf")], child.counts, strict=True):
                cumulated += count
                buckets.append(("+Inf" if bound == float("inf") else str(bound), cumulated))
            family.add_metric(values, buckets, child.sum)
        yield family

    def _new(self) -> Distribution:
        return Distribution(self._buckets)
