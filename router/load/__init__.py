"""Load on any OpenAI-style server: what `microserve bench` does."""

from router.load.client import Outcome, Target, closed_loop, open_loop
from router.load.report import show, summarize

__all__ = [
    "Outcome",
    "Target",
    "closed_loop",
    "open_loop",
    "show",
    "summarize",
]
