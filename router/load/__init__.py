"""Load on any OpenAI-style server: what `microserve bench` does."""

from router.load.arrivals import evenly, poisson
from router.load.client import Outcome, Target, closed_loop, open_loop
from router.load.report import Slo, show, summarize
from router.load.workload import WORKLOADS, LoadRequest, fixed, jsonl, long, mooncake, sharegpt

__all__ = [
    "WORKLOADS",
    "LoadRequest",
    "Outcome",
    "Slo",
    "Target",
    "closed_loop",
    "evenly",
    "fixed",
    "jsonl",
    "long",
    "mooncake",
    "open_loop",
    "poisson",
    "sharegpt",
    "show",
    "summarize",
]
