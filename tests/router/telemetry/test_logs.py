"""What the router logs at each level."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from router.telemetry.logs import set_up_logging

LEVELS = ("debug", "info", "warning", "error")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", "router", "engine")]
    before = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers


@pytest.mark.parametrize(
    ("level", "ours", "users"),
    [
        ("debug", LEVELS, LEVELS),
        ("info", LEVELS[1:], LEVELS[1:]),
        ("warning", LEVELS[2:], LEVELS[1:]),  # the default
        ("error", LEVELS[3:], LEVELS[3:]),
    ],
)
def test_strategies_log_from_info_on(level, ours, users, capsys):
    set_up_logging(level, "text", is_users=lambda record: record.name == "mine")
    for name in ("router.api", "somelib", "mine"):
        for each in LEVELS:
            getattr(logging.getLogger(name), each)(f"<{name} {each}>")
    shown = capsys.readouterr().err
    for name, wanted in (("router.api", ours), ("somelib", ours), ("mine", users)):
        assert [each for each in LEVELS if f"<{name} {each}>" in shown] == list(wanted)
    if level == "warning":  # what is not shown costs nothing on the hot path
        assert not logging.getLogger("router.api.accounting").isEnabledFor(logging.INFO)
