"""Prometheus metrics of one router, in a registry of its own.

Requests are counted when they end, from their receipts: nothing here is on the path of a token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, generate_latest

from router.telemetry.receipts import Receipt
from router.telemetry.series import Counter, Gauge, Histogram

__all__ = ["Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
# Swaps are cheap and frequent; the series of older generations are dropped.
GENERATIONS = 32


class Metrics:
    """The names begin with `microserve_router_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        # HTTP
        self.http = counter("http_requests", "HTTP requests", "path", "status")
        self.limited = counter("rate_limited", "requests over a key's limit", "limit")
        self.slow_clients = counter("slow_clients", "clients dropped", "reason")
        # Requests to the model, counted when they end
        self.requests = counter("requests", "requests", "status", "strategy", "generation")
        self.first_token = histogram("time_to_first_token_seconds", "TTFT", SECONDS, "strategy")
        self.per_token = histogram(
            "time_per_output_token_seconds", "TPOT: from first to last token, by token",
            TOKEN_SECONDS, "strategy",
        )  # fmt: skip
        self.seconds = histogram(
            "request_seconds", "JCT: from arrival to the end", SECONDS, "strategy"
        )
        self.queue_seconds = histogram("queue_seconds", "waiting for room", SECONDS)
        self.prompt_tokens = counter("prompt_tokens", "tokens of prompts")
        self.cached_tokens = counter("cached_tokens", "tokens of prompts found in a prefix cache")
        self.tokens = counter("generated_tokens", "tokens emitted")
        self.retries = counter("retries", "attempts after a failed one", "reason")
        self.retries_denied = counter("retries_denied", "retries that were over the budget")
        self.fallbacks = counter("fallbacks", "what was done otherwise than asked for", "fallback")
        self.put_bytes = counter("put_bytes", "bytes of KV put between engines")
        # What is the case now
        self.in_flight = gauge("requests_in_flight", "requests running")
        self.waiting = gauge("requests_waiting", "requests waiting for room")
        # Engines
        self.engine_up = gauge("engine_up", "1: takes new work", "engine")
        self.engine_load = gauge("engine_load", "work in flight there, in tokens", "engine")
        self.breaker_state = gauge("breaker_state", "0 closed, 1 half-open, 2 open", "engine")
        self.breaker_opened = counter("breaker_opened", "how often a breaker opened", "engine")
        # Strategies
        self.generation = gauge("strategy_generation", "the active generation")
        self.violations = counter(
            "strategy_offences", "what strategies did that they must not",
            "strategy", "generation", "kind",
        )  # fmt: skip
        self.canaries = counter("canaries", "canaries begun and decided", "decision")
        self.stalls = counter(
            "event_loop_stalls", "how often the event loop stood still in no strategy's code"
        )
        self._generations: deque[str] = deque()  # those that have series
        self._series: dict[str, set[tuple[str, ...]]] = {}

    def finished(self, receipt: Receipt) -> None:
        """Count a request that has ended."""
        strategy, generation = receipt.strategy, str(receipt.generation)
        status = receipt.error["type"] if receipt.error else receipt.status
        labels = (status, strategy, generation)
        self._bound(generation).add(labels)
        self.requests.labels(*labels).inc()
        self.prompt_tokens.inc(receipt.prompt_tokens)
        self.cached_tokens.inc(receipt.cached_tokens)
        self.tokens.inc(receipt.completion_tokens)
        if receipt.queued_ms:
            self.queue_seconds.observe(receipt.queued_ms / 1e3)
        if receipt.first_token_ms is not None:
            self.first_token.labels(strategy).observe(receipt.first_token_ms / 1e3)
        if receipt.status != "done":
            return
        if receipt.ms is not None:
            self.seconds.labels(strategy).observe(receipt.ms / 1e3)
        if (per_token_ms := receipt.per_token_ms()) is not None:
            self.per_token.labels(strategy).observe(per_token_ms / 1e3)

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def _bound(self, generation: str) -> set[tuple[str, ...]]:
        """The label sets of `generation`; those of the oldest go when there are too many."""
        if generation not in self._series:
            self._generations.append(generation)
            self._series[generation] = set()
            if len(self._generations) > GENERATIONS:
                for labels in self._series.pop(self._generations.popleft()):
                    self.requests.remove(*labels)
        return self._series[generation]

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        counter = Counter(f"microserve_router_{name}", help, labels)
        self.registry.register(counter)
        return counter

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        gauge = Gauge(f"microserve_router_{name}", help, labels)
        self.registry.register(gauge)
        return gauge

    def _histogram(self, name: str, help: str, buckets: Sequence[float], *labels: str) -> Histogram:
        histogram = Histogram(f"microserve_router_{name}", help, labels, buckets)
        self.registry.register(histogram)
        return histogram
