"""Engines with another cluster secret than most are named."""

from __future__ import annotations

import logging

import pytest
from stub_engine import StubEngine, backend_of

from router.engines.secrets import compare_secrets


def fleet(*digests: str | None) -> list:
    backends = []
    for number, digest in enumerate(digests):
        backend = backend_of(StubEngine(f"e{number}"))
        backend.id, backend.status = f"e{number}", "up"
        backend.state = type("State", (), {"secret_digest": digest})()
        backends.append(backend)
    return backends


@pytest.mark.parametrize(
    ("digests", "warned", "example"),
    [
        ((), [], ""),
        ((None, None), [], ""),
        (("1", "1"), [], ""),
        (("1", "2", "2"), [0], "e1"),
        (("2", "1", "2"), [1], "e0"),
        (("1", "2"), [1], "e0"),  # the first engine decides
        (("1", "2", "2", "1"), [1, 2], "e0"),
        ((None, "1", "2"), [2], "e1"),
    ],
)
def test_a_rare_secret_is_a_warning(digests, warned, example):
    backends = fleet(*digests)
    compare_secrets(backends)
    assert [n for n, backend in enumerate(backends) if backend.warning] == warned
    for number in warned:
        assert f"not that of engine {example}:" in backends[number].warning


def test_engines_that_are_down_do_not_count(caplog):
    caplog.set_level(logging.WARNING)
    first, *others = backends = fleet("1", "2", "2")
    for other in others:
        other.status = "down"
    compare_secrets(backends)
    assert not any(backend.warning for backend in backends)
    others[0].status = others[1].status = "up"
    for _ in range(3):
        compare_secrets(backends)
        assert first.warning and len(caplog.records) == 1  # a warning is logged once
    first.state.secret_digest = "2"
    compare_secrets(backends)
    assert not first.warning
