"""Limits per minute, with a clock that the tests set."""

from __future__ import annotations

import pytest

from router.admission.keys import ANYBODY, Key
from router.admission.rate_limit import Bucket, RateLimits, duration
from router.base.errors import RateLimited


class Clock:
    now = 1024.0

    def __call__(self) -> float:
        return self.now


def limits(requests: int = 0, tokens: int = 0) -> tuple[RateLimits, Clock]:
    clock = Clock()
    return RateLimits(requests, tokens, clock), clock


def refusal(of: RateLimits, key: Key = ANYBODY) -> tuple[str, float] | None:
    """Ask once; return the limit that was reached and the time to wait, None if admitted."""
    try:
        of.admit(key)
    except RateLimited as error:
        return error.limit, error.retry_after_s
    return None


def test_a_bucket_fills_evenly_and_never_beyond_its_limit():
    bucket = Bucket(60, 0.0)
    assert bucket.level(0.0) == 60
    assert bucket.level(1e6) == 60
    bucket.take(60, 2e6)  # it was full for long, and yet holds one minute's worth only
    assert bucket.level(2e6) == 0
    assert bucket.level(2e6 + 30) == bucket.level(2e6 + 30) == 30
    assert bucket.level(2e6 + 59) == 59
    assert bucket.level(2e6 + 61) == 60


def test_an_overdrawn_bucket_refills_from_below_zero():
    bucket = Bucket(120, 0.0)
    bucket.take(240, 0.0)
    assert bucket.level(0.0) == -120
    assert (bucket.until(1, 0.0), bucket.until(120, 0.0)) == (60.5, 120)
    assert bucket.level(90.0) == 60
    assert bucket.until(60, 90.0) == bucket.until(1, 90.0) == 0


def test_a_request_is_admitted_as_soon_as_there_is_one_again():
    of, clock = limits(requests=60)
    assert [refusal(of) for _ in range(61)] == [None] * 60 + [("requests", 1.0)]
    clock.now += 0.5
    assert refusal(of) == ("requests", 0.5)  # a refused request does not count
    clock.now += 0.5
    assert [refusal(of), refusal(of)] == [None, ("requests", 1.0)]


def test_a_key_with_one_token_left_is_admitted():
    of, clock = limits(requests=60, tokens=60)
    of.charge(ANYBODY, 59)
    assert refusal(of) is None
    of.charge(ANYBODY, 2)
    assert refusal(of) == ("tokens", 2.0)
    assert of.headers(ANYBODY)["x-ratelimit-remaining-requests"] == "59"  # it did not count
    clock.now += 2
    assert refusal(of) is None


@pytest.mark.parametrize(
    ("own", "default", "wanted"),
    [
        ((None, None), (0, 0), {}),
        ((5, None), (0, 0), {"requests": "5"}),
        ((None, 5), (0, 0), {"tokens": "5"}),
        ((None, None), (7, 9), {"requests": "7", "tokens": "9"}),
        ((5, None), (7, 9), {"requests": "5", "tokens": "9"}),
        ((0, None), (7, 0), {}),  # a key of its own without limits
        ((None, 0), (0, 9), {}),
    ],
)
def test_a_keys_own_limits_replace_the_configured_ones(own, default, wanted):
    of, key = RateLimits(*default, Clock()), Key("k", b"k", *own)
    prefix = "x-ratelimit-limit-"
    headers = of.headers(key)
    assert {n.removeprefix(prefix): v for n, v in headers.items() if prefix in n} == wanted
    assert len(headers) == 3 * len(wanted)
    of.charge(key, 1000)
    refused = refusal(of, key)
    assert (refused is not None and refused[0] == "tokens") == ("tokens" in wanted)


def test_headers_tell_what_is_left_and_when_it_is_full_again():
    of, clock = limits(requests=60, tokens=120)
    assert [refusal(of), refusal(of)] == [None, None]
    of.charge(ANYBODY, 150)
    clock.now += 0.5
    assert of.headers(ANYBODY) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "58",
        "x-ratelimit-reset-requests": "1.5s",
        "x-ratelimit-limit-tokens": "120",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m14s",  # from -29, at 2 a second
    }


def test_only_forgotten_keys_begin_anew():
    of, _ = limits(requests=1)
    kept, gone = Key("kept", b"1"), Key("gone", b"2")
    for key in (kept, gone, ANYBODY):
        assert refusal(of, key) is None
        assert refusal(of, key) is not None
    of.keep([kept])
    assert refusal(of, kept) is not None
    assert refusal(of, ANYBODY) is not None
    assert refusal(of, gone) is None


@pytest.mark.parametrize(
    ("seconds", "wanted"),
    [
        (0.0, "0ms"), (0.12, "120ms"), (0.999, "999ms"), (1.0, "1s"), (1.5, "1.5s"),
        (59.9, "59.9s"), (59.96, "1m0s"), (60.0, "1m0s"), (61.4, "1m1s"), (119.7, "2m0s"),
        (360.0, "6m0s"),
    ],
)  # fmt: skip
def test_durations_are_written_as_openai_does(seconds: float, wanted: str):
    assert duration(seconds) == wanted
