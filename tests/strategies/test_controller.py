"""The controller of `balanced`: its rule, with a clock that the tests set."""

from __future__ import annotations

from typing import Any

import pytest

from router import Chunk
from strategies.controller import Controller

PAIR = {"prefill": "p", "decode": "d", "prefills": ["p"], "decodes": ["d"]}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def finish(controller: Controller, clock: Clock, tokens: int, *, ms: float, decode_s: float):
    """Run one request alone, with these times for prefill and decode."""
    with controller.divide(tokens, **PAIR) as division:
        clock.now += division.prefill_tokens * ms / 1e3
        if division.prefill_tokens:
            division.sent(division.prefill_tokens)
        clock.now += (tokens - division.prefill_tokens) * ms / 1e3
        division.received(Chunk([1]))
        clock.now += decode_s
        division.received(Chunk([1], finish_reason="length"))
    clock.now += 100.0
    return division.prefill_tokens


def near(tokens: int) -> Any:
    return pytest.approx(tokens, abs=6)


def test_the_division_follows_its_formula(clock):
    controller = Controller(clock)
    assert finish(controller, clock, 1000, ms=1, decode_s=0.2) == 900  # no measurement yet
    # Of a second of work, with 0.2 s of decoding: (T + 0.7 S) / 2; they come so rarely that ρ ≈ 0.
    assert finish(controller, clock, 1000, ms=1, decode_s=0.2) == near(450)
    with controller.divide(1000, **PAIR) as first:
        assert first.prefill_tokens == near(450)
        # B = 450, G = 550: (200 + 550 + 700 - 0.5 · 450) / 2
        with controller.divide(1000, **PAIR) as second:
            assert second.prefill_tokens == near(612)
        clock.now += 0.1  # 100 of them are done
        with controller.divide(1000, **PAIR) as third:
            assert third.prefill_tokens == near(637)
    clock.now += 100.0
    with controller.divide(1000, **PAIR) as last:  # earlier requests have left no load behind
        assert last.prefill_tokens == near(450)


@pytest.mark.parametrize(
    ("every_s", "share"),
    [
        (1.5, 417),  # ρ = 1/3: (2/3 T + 0.7 S) / 2
        (0.5, 410),  # ρ = 1, bounded by 0.4
    ],
)
def test_streams_count_less_where_the_engines_are_busy(clock, every_s, share):
    controller = Controller(clock)
    finish(controller, clock, 1000, ms=1, decode_s=0.2)
    for _ in range(60):
        clock.now += every_s
        with controller.divide(1000, **PAIR) as division:
            pass
    assert division.prefill_tokens == near(share)


def test_small_speed_differences_between_engines_are_ignored(clock):
    def share(slower: float) -> int:
        controller = Controller(clock)
        for _ in range(5):
            with controller.divide(1000, **PAIR) as division:
                clock.now += division.prefill_tokens / 1e3
                division.sent(division.prefill_tokens)
                clock.now += (1000 - division.prefill_tokens) * slower / 1e3
                division.received(Chunk([1]))
                clock.now += 0.2
                division.received(Chunk([1], finish_reason="length"))
            clock.now += 100.0
        return division.prefill_tokens

    assert share(1.0) == near(450)
    assert share(1.5) == near(430)  # T is fewer tokens, at 1.25 ms each, and nothing else changes
    assert share(2.0) > 500  # a different machine


@pytest.mark.parametrize(
    ("prefills", "decodes", "share"),
    [
        (["p", "q"], ["d"], 600),  # half as many queue here: (T + 0.7 S) / 1.5
        (["p"], ["d", "e"], 300),  # half as many streams there: half of (T + 0.7 S) / 1.5
        (["p", "d"], ["p", "d"], 350),  # each has both: streams are no reason. (0.7 S) / 2
    ],
)
def test_the_number_of_engines_of_each_role_counts(clock, prefills, decodes, share):
    controller = Controller(clock)
    finish(controller, clock, 1000, ms=1, decode_s=0.2)
    pools = {"prefills": prefills, "decodes": decodes}
    with controller.divide(1000, prefill="p", decode="d", **pools) as division:
        assert division.prefill_tokens == near(share)


def test_the_last_token_is_never_sent(clock):
    controller = Controller(clock)
    for tokens in (1, 2, 3):
        assert finish(controller, clock, tokens, ms=1, decode_s=1000) == tokens - 1


def test_a_single_engine_divides_nothing(clock):
    controller = Controller(clock)
    alone = {"prefill": "d", "decode": "d", "prefills": ["d"], "decodes": ["d"]}
    with controller.divide(100, **alone) as division:
        assert division.prefill_tokens == 0


def test_failed_requests_are_neither_queued_nor_measured(clock):
    controller = Controller(clock)
    finish(controller, clock, 1000, ms=1, decode_s=0.2)
    for point in range(3):
        with pytest.raises(RuntimeError), controller.divide(1000, **PAIR) as division:
            clock.now += 50.0
            if point > 0:
                division.sent(0)
            if point > 1:
                division.received(Chunk([1]))
            raise RuntimeError
        assert not any(engine.tokens for engine in controller._engines.values())
        clock.now += 50.0


def test_removed_engines_are_forgotten(clock):
    controller = Controller(clock)
    for n in range(100):
        pair = {"prefill": f"p{n}", "decode": "d", "prefills": [f"p{n}"], "decodes": ["d"]}
        with controller.divide(10, **pair):
            assert len(controller._engines) == 2
