"""How much an OpenAI server has to do, from its Prometheus metrics."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Gauges", "read_gauges"]

# Running and waiting requests, as vLLM, SGLang, llama.cpp, TGI and this router name them.
_RUNNING = (
    b"vllm:num_requests_running", b"sglang:num_running_reqs", b"llamacpp:requests_processing",
    b"tgi_batch_current_size", b"microserve_router_requests_in_flight",
)  # fmt: skip
_WAITING = (
    b"vllm:num_requests_waiting", b"sglang:num_queue_reqs", b"llamacpp:requests_deferred",
    b"tgi_queue_size", b"microserve_router_requests_waiting",
)  # fmt: skip
_LINE = re.compile(
    rb"^(" + b"|".join(map(re.escape, _RUNNING + _WAITING)) + rb")(?:\{[^}\n]*\})? +([0-9.eE+]+)",
    re.MULTILINE,
)
MOST = 10**6  # requests


class Gauges(NamedTuple):
    running: int
    waiting: int


def read_gauges(text: bytes) -> Gauges | None:
    """Return the requests that a server works on, over all its parts; None if it does not tell."""
    found = {True: 0.0, False: 0.0}
    seen = False
    for name, value in _LINE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        found[name in _RUNNING] += min(number, MOST)
        seen = True
    if not seen:
        return None
    return Gauges(int(min(found[True], MOST)), int(min(found[False], MOST)))
