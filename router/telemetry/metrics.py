"""Prometheus metrics of one router, in a registry of its own.

Requests are counted when they end, from their receipts: no metric is updated per token.
"""

from __future__ import annotations

from collections import OrderedDict

import prometheus_client
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from router.telemetry.activity import Flows
from router.telemetry.merged import Samples, samples_of
from router.telemetry.receipts import Receipt

__all__ = ["Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
# Strategies are swapped often; the series of older generations are dropped.
GENERATIONS = 32

# A `_created` series per counter and histogram would double the page.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # has no annotations


class Metrics:
    """All metrics; the names of our own begin with `microserve_router_`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU time, memory, open files
        counter, gauge, histogram = self._counter, self._gauge, self._histogram
        # HTTP
        self.http = counter("http_requests", "HTTP requests", "path", "status")
        self.limited = counter("rate_limited", "requests over a key's limit", "limit")
        self.slow_clients = counter("slow_clients", "clients dropped", "reason")
        self.connections = gauge("connections", "open connections of clients")
        self.connections_refused = counter(
            "connections_refused", "connections beyond --max-connections"
        )
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
        self.flows = Flows()
        # What is the case now
        self.running = 0  # requests; a plain number, since a gauge takes a lock for every change
        gauge("requests_in_flight", "requests running").set_function(lambda: self.running)
        self.waiting = gauge("requests_waiting", "requests waiting for room")
        # Engines
        self.engine_up = gauge("engine_up", "1: takes new work", "engine")
        self.engine_load = gauge("engine_load", "work in flight there, in tokens", "engine")
        self.breaker_state = gauge("breaker_state", "0 closed, 1 half-open, 2 open", "engine")
        self.breaker_opened = counter("breaker_opened", "how often a breaker opened", "engine")
        # Memory lent between engines, in pages, as far as the ledger knows
        self.ledger_available = gauge("ledger_available", "pages it would lend now", "engine")
        self.ledger_lent = gauge("ledger_lent", "pages it has lent", "engine")
        self.ledger_borrowed = gauge("ledger_borrowed", "pages it has borrowed", "engine")
        self.debt_swaps = counter(
            "debt_swaps", "swaps of cycles of debts: done, partly, nothing", "outcome"
        )
        self.debt_swap_blocks = counter("debt_swap_blocks", "blocks that swaps brought home")
        self.debt_swap_refusals = counter("debt_swap_refusals", "orders that failed", "reason")
        # Pinned prefixes
        self.pinned_prefixes = gauge("pinned_prefixes", "prefixes that the fleet keeps")
        self.pin_copies_wanted = gauge("pin_copies_wanted", "copies of them that are wanted")
        self.pin_copies = gauge("pin_copies", "copies of them that are pinned")
        self.pin_copies_made = counter(
            "pin_copies_made", "copies that were cached already, put there or computed", "how"
        )
        self.pin_failures = counter("pin_failures", "copies that could not be made", "reason")
        # Strategies
        self.delegations = counter("delegations", "calls of a strategy by another one", "delegate")
        self.generation = gauge("strategy_generation", "the active generation")
        self.violations = counter(
            "strategy_offences", "what strategies did that they must not",
            "strategy", "generation", "kind",
        )  # fmt: skip
        self.canaries = counter("canaries", "canaries begun and decided", "decision")
        for decision in ("begun", "promoted", "rolled_back"):  # from 0, so that the first is seen
            self.canaries.labels(decision)
        self.stalls = counter(
            "event_loop_stalls", "how often the event loop stood still in no strategy's code"
        )
        # The host
        self.host_stalls = counter(
            "host_stalls", "how often this process did not run, as on an overloaded host"
        )
        self.host_stalled_seconds = counter("host_stalled_seconds", "time of these stalls")
        # Children that were looked up already: `labels` takes a lock and checks its arguments.
        self._answers: dict[tuple[str, int], Counter] = {}
        self._histograms: dict[tuple[Histogram, str], Histogram] = {}
        # The counters of `requests` by label values, by generation, oldest generation first.
        self._ended: OrderedDict[str, dict[tuple[str, str, str], Counter]] = OrderedDict()

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP request."""
        if (counter := self._answers.get((path, status))) is None:
            counter = self._answers[path, status] = self.http.labels(path, status)
        counter.inc()

    def finished(self, receipt: Receipt) -> None:
        """Count a request that has ended."""
        self._count(receipt)
        self.prompt_tokens.inc(receipt.prompt_tokens)
        if receipt.cached_tokens:
            self.cached_tokens.inc(receipt.cached_tokens)
        self.tokens.inc(receipt.completion_tokens)
        if receipt.queued_ms:
            self.queue_seconds.observe(receipt.queued_ms / 1e3)
        strategy = receipt.strategy
        if receipt.first_token_ms is not None:
            self._of(self.first_token, strategy).observe(receipt.first_token_ms / 1e3)
        if receipt.status != "done":
            return
        if receipt.ms is not None:
            self._of(self.seconds, strategy).observe(receipt.ms / 1e3)
        if (per_token_ms := receipt.per_token_ms()) is not None:
            self._of(self.per_token, strategy).observe(per_token_ms / 1e3)

    def put(self, source: str, target: str, size: int) -> None:
        """Count a send of `size` bytes from one engine to another."""
        self.put_bytes.inc(size)
        self.flows.add(source, target, size)

    def render(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def samples(self) -> Samples:
        """Return all metrics as values that can be merged with those of other processes."""
        return samples_of(self.registry)

    def _count(self, receipt: Receipt) -> None:
        """Count it in `requests`; drop the oldest generation's series if there are too many."""
        generation = str(receipt.generation)
        if (counters := self._ended.get(generation)) is None:
            counters = self._ended[generation] = {}
            if len(self._ended) > GENERATIONS:
                _, dropped = self._ended.popitem(last=False)
                for labels in dropped:
                    self.requests.remove(*labels)
        status = receipt.error["type"] if receipt.error else receipt.status
        labels = (status, receipt.strategy, generation)
        if (counter := counters.get(labels)) is None:
            counter = counters[labels] = self.requests.labels(*labels)
        counter.inc()

    def _of(self, histogram: Histogram, strategy: str) -> Histogram:
        key = (histogram, strategy)
        if (child := self._histograms.get(key)) is None:
            child = self._histograms[key] = histogram.labels(strategy)
        return child

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(f"microserve_router_{name}", help, labels, registry=self.registry)

    def _gauge(self, name: str, help: str, *labels: str) -> Gauge:
        return Gauge(f"microserve_router_{name}", help, labels, registry=self.registry)

    def _histogram(
        self, name: str, help: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"microserve_router_{name}", help, labels, buckets=buckets, registry=self.registry
        )
