"""The circuit breaker, with a clock that the tests set."""

from __future__ import annotations

from router.engines.circuit_breaker import LONGEST_S, CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_opens_on_failures_in_a_row_only():
    breaker = CircuitBreaker(3, 5.0, Clock())
    for _ in range(5):
        breaker.failure()
        assert not breaker.failure()
        breaker.success()
    assert (breaker.state, breaker.opened) == ("closed", 0)
    assert [breaker.failure() for _ in range(4)] == [False, False, True, False]
    assert (breaker.state, breaker.resting, breaker.opened) == ("open", True, 1)


def test_half_open_allows_one_trial():
    clock = Clock()
    breaker = CircuitBreaker(1, 5.0, clock)
    assert breaker.failure()
    clock.now += 5
    assert (breaker.state, breaker.resting) == ("half_open", False)
    breaker.begin()
    assert breaker.resting
    breaker.success()
    assert (breaker.state, breaker.resting) == ("closed", False)


def test_each_failed_trial_doubles_the_open_time_up_to_a_bound():
    clock = Clock()
    breaker = CircuitBreaker(1, 5.0, clock)
    breaker.failure()
    rests = []
    for _ in range(6):
        began = clock.now
        while breaker.state == "open":
            clock.now += 1
        rests.append(clock.now - began)
        breaker.begin()
        assert breaker.failure()
    assert rests == [5, 10, 20, 40, 60, 60]
    clock.now += LONGEST_S
    breaker.success()
    breaker.failure()
    clock.now += 5
    assert breaker.state == "half_open"  # after a success, the first open time is short again


def test_a_trial_that_never_ends_is_followed_by_another():
    clock = Clock()
    breaker = CircuitBreaker(1, 5.0, clock)
    breaker.failure()
    clock.now += 5
    breaker.begin()
    clock.now += 4.9
    assert breaker.resting
    clock.now += 0.1
    assert not breaker.resting


def test_a_trip_opens_it_whatever_came_before():
    breaker = CircuitBreaker(3, 5.0, Clock())
    breaker.success()
    assert breaker.trip()
    assert not breaker.trip()
    assert (breaker.state, breaker.opened) == ("open", 1)


def test_a_new_breaker_opens_on_its_third_failure():
    clock = Clock()
    clock.now = 0.0
    breaker = CircuitBreaker(3, 0.5, clock)
    assert [breaker.failure() for _ in range(3)] == [False, False, True]
    clock.now = 0.4
    assert (breaker.state, breaker.resting) == ("open", True)
    clock.now = 0.5
    assert (breaker.state, breaker.resting) == ("half_open", False)


def test_a_trial_ends_with_its_success_or_failure():
    """What follows is not taken for its going on."""
    clock = Clock()
    breaker = CircuitBreaker(1, 5.0, clock)
    breaker.failure()
    clock.now += 5
    breaker.begin()
    breaker.success()
    breaker.failure()
    clock.now += 5
    assert not breaker.resting
    breaker.begin()
    breaker.failure()
    clock.now += 9.9
    assert breaker.resting
    clock.now += 0.1
    assert (breaker.state, breaker.resting) == ("half_open", False)


def test_a_long_open_time_does_not_become_shorter():
    clock = Clock()
    breaker = CircuitBreaker(1, 10 * LONGEST_S, clock)
    for _ in range(3):
        breaker.failure()
        clock.now += 10 * LONGEST_S - 1
        assert breaker.state == "open"
        clock.now += 1
        assert not breaker.resting
        breaker.begin()
