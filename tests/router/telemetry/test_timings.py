"""Lifetime events: they never decrease, and their phases add up, for any receipt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.telemetry.receipts import Leg, Receipt

MS = st.floats(0, 1e4)


def leg(call: str, start: float, ms: float | None, **fields: object) -> Leg:
    return Leg(call, "e", fields.pop("attempt", "r"), 0, 1, 0, 10, start, ms, **fields)


def receipt(ms: float | None, *legs: Leg) -> Receipt:
    made = Receipt("x", 1, "s", {}, 0, 10, ms=ms)
    made.legs.extend(legs)
    return made


legs = st.builds(
    leg,
    st.sampled_from(["prep_recv", "remote_send", "start_generate", "commit"]),
    MS,
    st.none() | MS,
    attempt=st.sampled_from("ab"),
    first_token_ms=st.none() | MS,
    sent_tokens=st.integers(0, 2),
    put_ms=MS,
)


@given(MS, st.lists(legs, max_size=6))
def test_lifetime_events_never_decrease_and_phases_add_up(ms, some):
    it = receipt(ms, *some).timings()
    events = list(it.events().values())
    assert events == sorted(events)
    assert (events[0], events[-1]) == (0, ms)
    assert abs(sum(it.breakdown().values()) - ms) < 1e-6
    assert min(it.breakdown().values()) >= 0


def test_phases_with_one_engine():
    it = receipt(100, leg("start_generate", 10, 85, first_token_ms=30)).timings()
    assert it.breakdown() == {"queue": 10, "prefill": 30, "migration": 0, "decode": 60}


def test_phases_with_two_engines():
    """The part of a send after the last computed token counts as migration."""
    done = receipt(
        100,
        leg("prep_recv", 5, 2),
        leg("remote_send", 8, 40, sent_tokens=9, put_ms=6),
        leg("start_generate", 50, 45, first_token_ms=5),
    )
    assert done.timings().breakdown() == {"queue": 5, "prefill": 37, "migration": 6, "decode": 52}
    assert done.timings().server_timing() == (
        "queue;dur=5.0, prefill;dur=37.0, migration;dur=6.0, decode;dur=52.0, total;dur=100.0"
    )


def test_phases_without_an_engine():
    assert receipt(100).timings().breakdown()["queue"] == 100
