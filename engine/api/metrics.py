"""Prometheus metrics, under vLLM's names where vLLM has the metric, so that dashboards work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.protocol import RemoteSendReply

if TYPE_CHECKING:
    from engine.service.engine import MicroserveEngine
    from kvcache.cache import KVCache

__all__ = ["EngineMetrics"]

Reading = tuple[str, str, Callable[[], float]]  # name, help, what to call
LENGTHS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000)
LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class EngineMetrics:
    """One registry per engine: two in a process do not meet."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._prefix_queries = self._counter(
            "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self._prefix_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache"
        )
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From the call to the first token"
        )
        self._inter_token = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two tokens of a request"
        )
        self._seconds = self._histogram(
            "vllm:e2e_request_latency_seconds", "From the call to the end"
        )
        self._prompts = self._histogram("vllm:request_prompt_tokens", "Prompts", LENGTHS)
        self._completions = self._histogram("vllm:request_generation_tokens", "Answers", LENGTHS)
        self._successes = Counter(
            "vllm:request_success",
            "Generations that came to their end",
            [*self._label, "finished_reason"],
            registry=self.registry,
        )
        self._sent_bytes = self._counter("microserve:kv_sent_bytes", "KV put to peers")
        self._sends = self._counter("microserve:remote_sends", "remote_send calls that completed")
        self._mirrors_stopped = Counter(
            "microserve:mirrors_stopped",
            "Mirrors that ended before their generation, by error",
            [*self._label, "reason"],
            registry=self.registry,
        )

    def finished(self, reason: str, prompt: int, completion: int, seconds: float) -> None:
        """A generation has come to its end `seconds` after the call."""
        self._successes.labels(**self._label, finished_reason=reason).inc()
        self._seconds.observe(seconds)
        self._prompts.observe(prompt)
        self._completions.observe(completion)

    def prefix(self, tokens: int, hits: int) -> None:
        """`tokens` were looked up in the prefix cache, `hits` of them found."""
        self._prefix_queries.inc(tokens)
        self._prefix_hits.inc(hits)

    def token(self, seconds: float, *, first: bool) -> None:
        """A token came `seconds` after the one before it, or after the call."""
        (self._first_token if first else self._inter_token).observe(seconds)

    def sent(self, reply: RemoteSendReply) -> None:
        """A send has completed."""
        self._sent_bytes.inc(reply.bytes)
        self._sends.inc()

    def mirror_stopped(self, reason: str) -> None:
        """A mirror has ended before its generation, by an error of type `reason`."""
        self._mirrors_stopped.labels(**self._label, reason=reason).inc()

    def watch(self, engine: MicroserveEngine) -> None:
        """Read these from the engine whenever somebody asks."""
        cache, stats = engine.cache, engine.loop.stats
        gauges: tuple[Reading, ...] = (
            ("vllm:num_requests_running", "Generations being computed", lambda: engine.running),
            ("vllm:num_requests_waiting", "Generations that wait", lambda: engine.waiting),
            ("vllm:kv_cache_usage_perc", "Share of pages in use, 0 to 1", lambda: usage(engine)),
            ("microserve:leases", "Receive leases that live", lambda: len(cache.leases())),
            (
                "microserve:pages_quarantined",
                "Pages that a put may still be writing",
                lambda: cache.page_use().quarantined,
            ),
            ("microserve:mirrors_running", "Generations mirrored", lambda: engine.mirrors.running),
        )
        counters: tuple[Reading, ...] = (
            ("microserve:mirrored_tokens", "Tokens mirrored", lambda: engine.mirrors.sent),
            ("microserve:steps", "Steps since the start", lambda: stats.steps),
            ("microserve:step_seconds", "Time in steps", lambda: stats.step_s),
            ("microserve:model_seconds", "Time in the model", lambda: stats.model_s),
            ("microserve:failed_steps", "Steps that raised", lambda: stats.failed_steps),
            ("microserve:expired_leases", "Leases that ran out", lambda: stats.expired_leases),
            ("vllm:prompt_tokens", "Prompt tokens computed", lambda: stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens drawn", lambda: stats.generation_tokens),
            ("vllm:num_preemptions", "Generations put back", lambda: engine.preemptions),
        )
        self.registry.register(_Readings(self._label, gauges, counters))
        self._watch_tiers(cache)

    def _watch_tiers(self, cache: KVCache) -> None:
        def gauge(name: str, help: str, *more: str) -> Gauge:
            labels = [*self._label, "tier", *more]
            return Gauge(f"microserve:tier_{name}", help, labels, registry=self.registry)

        def pages(place: int, owner: str) -> int:
            return int(getattr(cache.tier_use()[place], owner))

        held = gauge("pages", "Pages below the pool, by owner", "owner")
        counted = {
            "promoted_tokens": gauge("promoted_tokens", "Tokens brought back for a prompt"),
            "swaps_out": gauge("swaps_out", "Preempted sequences moved to the tier"),
            "swaps_in": gauge("swaps_in", "Preempted sequences brought back"),
            "bytes_in": gauge("bytes_in", "KV written to the tier"),
            "bytes_out": gauge("bytes_out", "KV read from the tier"),
            "failures": gauge("failures", "Pages that could not be copied"),
            "skipped": gauge("skipped", "Prefixes not copied, for want of time or room"),
        }
        for place, tier in enumerate(cache.tiers):
            label = {**self._label, "tier": tier.name}
            for owner in ("free", "cached", "swapped", "copying"):
                held.labels(**label, owner=owner).set_function(partial(pages, place, owner))
            for name, count in counted.items():
                count.labels(**label).set_function(partial(getattr, tier.stats, name))

    def render(self) -> bytes:
        """The Prometheus text format."""
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
    """What the engine counts itself, read when somebody asks."""

    def __init__(
        self, label: dict[str, str], gauges: Sequence[Reading], counters: Sequence[Reading]
    ) -> None:
        self._label = label
        self._gauges = gauges
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._label), list(self._label.values())
        for name, help, read in self._gauges:
            gauge = GaugeMetricFamily(name, help, labels=names)
            gauge.add_metric(values, read())
            yield gauge
        for name, help, read in self._counters:
            counter = CounterMetricFamily(name, help, labels=names)
            counter.add_metric(values, read())
            yield counter


def usage(engine: MicroserveEngine) -> float:
    """Share of the pages that are neither free nor merely cached."""
    use = engine.cache.page_use()
    return 1.0 - (use.free + use.cached) / use.total
