"""What passes between a lead and its workers: settings, messages, steps, and sums.

May import nothing of the rooms beside it.
"""

from engine.workers.exchange.forks import FORK, MESSAGE, REAP
from engine.workers.exchange.settings import WorkerSettings
from engine.workers.exchange.shared_sum import SharedSum, set_stopped, sum_bytes
from engine.workers.exchange.step_message import StepMessage
from engine.workers.exchange.wire import (
    MOST_BYTES,
    Array,
    Kind,
    receive,
    send,
    send_text,
    text_of,
)

__all__ = [
    "FORK",
    "MESSAGE",
    "MOST_BYTES",
    "REAP",
    "Array",
    "Kind",
    "SharedSum",
    "StepMessage",
    "WorkerSettings",
    "receive",
    "send",
    "send_text",
    "set_stopped",
    "sum_bytes",
    "text_of",
]
