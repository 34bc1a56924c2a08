"""Prometheus metrics, under vLLM's names where vLLM has the metric, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.protocol import RemoteSendReply

__all__ = ["EngineMetrics", "Reading"]

LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Reading:
    """A value that is read at each scrape: a gauge, or a counter kept elsewhere."""

    name: str
    help: str
    read: Callable[[], float]
    counter: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)  # besides the model's name


class EngineMetrics:
    """The metrics of one engine, in a registry of its own: a process may run several engines."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU time, memory, open files
        self._label = {"model_name": model_name}
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Seconds from the call to the first token"
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Seconds between two tokens of a request"
        )
        self._seconds = self._histogram(
            "vllm:e2e_request_latency_seconds", "Seconds from the call to the last token"
        )
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Tokens per prompt", LENGTHS)
        self._completions = self._histogram(
            "vllm:request_generation_tokens", "Tokens per output", LENGTHS
        )
        self._successes = Counter(
            "vllm:request_success",
            "Generations that finished",
            [*self._label, "finished_reason"],
            registry=self.registry,
        )
        self._sent_bytes = self._counter("microserve:kv_sent_bytes", "Bytes of KV put to peers")
        self._sends = self._counter("microserve:remote_sends", "remote_send calls that completed")
        self._connections_refused = self._counter(
            "microserve:connections_refused", "Connections beyond --max-connections"
        )
        self._mirrors_stopped = Counter(
            "microserve:mirrors_stopped",
            "Mirrors that an error stopped, by error type",
            [*self._label, "reason"],
            registry=self.registry,
        )

    def finished(self, reason: str, prompt: int, completion: int, seconds: float) -> None:
        """Count a generation that finished `seconds` after its call."""
        self._successes.labels(**self._label, finished_reason=reason).inc()
        self._seconds.observe(seconds)
        self._prompts.observe(prompt)
        self._completions.observe(completion)

    def prefix(self, tokens: int, hits: int) -> None:
        """Count `tokens` looked up in the prefix cache, `hits` of them found."""
        self._prefix_queries.inc(tokens)
        self._prefix_hits.inc(hits)

    def token(self, seconds: float, *, first: bool) -> None:
        """Observe a token, `seconds` after the previous one or, if `first`, after the call."""
        (self._first_token if first else self._inter_token).observe(seconds)

    def sent(self, reply: RemoteSendReply) -> None:
        """Count a completed send."""
        self._sent_bytes.inc(reply.bytes)
        self._sends.inc()

    def mirror_stopped(self, reason: str) -> None:
        """Count a mirror that an error of type `reason` stopped before its generation ended."""
        self._mirrors_stopped.labels(**self._label, reason=reason).inc()

    def connection_refused(self) -> None:
        """Count a connection beyond the limit."""
        self._connections_refused.inc()

    def show_connections(self, read: Callable[[], float]) -> None:
        """Export the number of open connections, which `read` returns."""
        self.register([Reading("microserve:connections", "Open connections", read)])

    def register(self, readings: Sequence[Reading]) -> None:
        """Export values that the engine keeps itself; they are read at each scrape."""
        self.registry.register(_Readings(self._label, readings))

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def _counter(self, name: str, help: str) -> Counter:
        counter = Counter(name, help, list(self._label), registry=self.registry)
        return counter.labels(**self._label)

    def _histogram(self, name: str, help: str, buckets: Sequence[float] = LATENCY_S) -> Histogram:
        histogram = Histogram(
            name, help, list(self._label), buckets=buckets, registry=self.registry
        )
        return histogram.labels(**self._label)


class _Readings(Collector):
    """Exports readings; those of one name follow one another."""

    def __init__(self, label: dict[str, str], readings: Sequence[Reading]) -> None:
        self._label = label
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        """Read all values."""
        for name, group in groupby(self._readings, key=attrgetter("name")):
            readings = list(group)
            first = readings[0]
            family = CounterMetricFamily if first.counter else GaugeMetricFamily
            metric = family(name, first.help, labels=[*self._label, *first.labels])
            for reading in readings:
                values = [*self._label.values(), *reading.labels.values()]
                metric.add_metric(values, reading.read())
            yield metric
