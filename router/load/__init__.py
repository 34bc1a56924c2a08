"""Load on any OpenAI-style server: what `microserve bench` does."""

from router.load.client import Outcome, Target, closed_loop, open_loop
from router.load.report import Slo, show, summarize

__all__ = [
    "Outcome",
    "Slo",
    "Target",
    "closed_loop",
    "open_loop",
    "show",
    "summarize",
]
