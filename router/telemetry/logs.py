"""Logs as text or JSON. Each record names the request that it is about, if any."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Literal

import orjson

from router.telemetry.receipts import Receipt

__all__ = ["LogFormat", "serves", "set_up_logging"]

LogFormat = Literal["text", "json"]
OURS = ("router", "engine")
# What a terminal obeys, apart from tabs and ends of lines; C1 codes, too.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
_receipt: ContextVar[Receipt | None] = ContextVar("receipt", default=None)


def serves(receipt: Receipt) -> None:
    """Name this request in all that this task, and tasks that it starts, log from now on."""
    _receipt.set(receipt)


def set_up_logging(
    level: str,
    format: LogFormat,
    *,
    is_users: Callable[[logging.LogRecord], bool] = lambda _: False,
) -> None:
    """Log records from `level` on to standard error.

    At the default level, `warning`, what strategies log is shown from `info` on; `is_users` tells
    which records are theirs.
    """
    least = getattr(logging, level.upper())
    users_least = logging.INFO if least == logging.WARNING else least
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(lambda record: record.levelno >= least or is_users(record))
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter())
    logging.basicConfig(level=users_least, handlers=[handler], force=True)
    for package in OURS:  # their loggers make no records that would not be shown
        logging.getLogger(package).setLevel(least)


class TextFormatter(logging.Formatter):
    """`TIME LEVEL LOGGER [REQUEST STRATEGY/GENERATION]: MESSAGE NAME=VALUE…`

    Messages quote clients, engines and strategies. So control codes are written as escapes, and
    further lines of a message are indented: none of them looks like a record.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s%(fields)s")

    def format(self, record: logging.LogRecord) -> str:
        receipt = _receipt.get()
        record.request = (
            f" [{receipt.id} {receipt.strategy}/{receipt.generation}]" if receipt else ""
        )
        fields = getattr(record, "receipt", {})
        record.fields = "".join(f" {name}={value}" for name, value in fields.items())
        return _CONTROL.sub(_escape, super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\n    ")


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if receipt := _receipt.get():
            fields["request_id"] = receipt.id
            fields["strategy"] = receipt.strategy
            fields["generation"] = receipt.generation
        fields.update(getattr(record, "receipt", {}))
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(fields, default=str).decode()
        except TypeError:  # half of a surrogate pair, or an integer of more than 64 bits
            return json.dumps(fields, default=str)


def _escape(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()
