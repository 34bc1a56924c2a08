"""Prometheus metrics of one router, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Metrics:
    """The names begin with `microserve_`."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "microserve_requests", "HTTP requests", ["path", "status"], registry=registry
        )
        self.in_flight = Gauge(
            "microserve_requests_in_flight", "requests running", registry=registry
        )
        self.waiting = Gauge(
            "microserve_requests_waiting", "requests waiting for room", registry=registry
        )
        self.first_token = Histogram(
            "microserve_time_to_first_token_seconds",
            "from arrival to the first token",
            registry=registry,
            buckets=SECONDS,
        )
        self.seconds = Histogram(
            "microserve_request_seconds", "from arrival to the end", registry=registry,
            buckets=SECONDS,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "microserve_prompt_tokens", "tokens of prompts", registry=registry
        )
        self.tokens = Counter("microserve_generated_tokens", "tokens emitted", registry=registry)
        self.retries = Counter(
            "microserve_retries", "attempts after a failed one", ["reason"], registry=registry
        )
        self.collapsed = Counter(
            "microserve_collapsed",
            "attempts made with one engine, whatever the strategy wants",
            registry=registry,
        )
        self.put_bytes = Counter(
            "microserve_put_bytes", "bytes of KV put between engines", registry=registry
        )
        self.engine_up = Gauge(
            "microserve_engine_up", "1: takes new work", ["engine"], registry=registry
        )
        self.generation = Gauge(
            "microserve_strategy_generation", "the active generation", registry=registry
        )

    def render(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)
