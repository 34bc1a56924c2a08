"""What the router logs at each level."""

from __future__ import annotations

import json
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


def test_a_message_can_neither_steer_a_terminal_nor_forge_a_record(capsys):
    set_up_logging("warning", "text")
    log = logging.getLogger("router.api")
    log.warning(
        "it said %s", "\x1b]0;title\x07 \x9b31m\r\n2026-01-01 00:00:00,000 ERROR x: forged\tü"
    )
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        log.exception("failed")
    shown = capsys.readouterr().err
    assert all(char.isprintable() or char in "\n\t" for char in shown)
    assert r"it said \x1b]0;title\x07 \x9b31m\r" in shown
    assert "\n    2026-01-01 00:00:00,000 ERROR x: forged\tü\n" in shown
    assert "\nTraceback (most recent call last):\n" in shown and r"ValueError: \x1b[2J" in shown


@pytest.mark.parametrize("told", ["half a pair: \ud800", 1 << 70])
def test_what_orjson_refuses_is_logged_as_json_all_the_same(told, capsys):
    set_up_logging("warning", "json")
    logging.getLogger("router.api").warning("it said %s", told, extra={"receipt": {"told": told}})
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["told"] == told
    assert json.loads(line)["message"] == f"it said {told}"
