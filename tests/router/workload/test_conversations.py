"""Conversations: what their turns share, and when they come."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict

import pytest

from engine.protocol import page_names
from router.workload.arrivals import evenly, poisson
from router.workload.conversations import Conversations

PAGE = 16
SHAPE = Conversations(system_tokens=64, new_tokens=32, answer_tokens=48, turns=3, think_s=5.0)


def by_session(requests):
    sessions = defaultdict(list)
    for request in requests:
        sessions[request.session].append(request)
    return list(sessions.values())


def of_sessions(count, shape=SHAPE, seed=0, starts=None):
    return list(shape.requests(seed, itertools.islice(starts or evenly(1.0), count)))


def pages(request):
    return page_names(request.body["prompt"], PAGE)


def shared(one, other):
    """Return how many pages two prompts begin with in common."""
    pairs = zip(pages(one), pages(other), strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def test_a_turn_repeats_all_that_was_said_before():
    sessions = by_session(of_sessions(40))
    assert len(sessions) == 40
    assert {len(session) for session in sessions} == set(range(1, 6))
    for session in sessions:
        for before, after in itertools.pairwise(session):
            prompt, longer = before.body["prompt"], after.body["prompt"]
            assert longer[: len(prompt)] == prompt
            assert shared(before, after) == len(prompt) // PAGE
            new = len(longer) - len(prompt) - SHAPE.answer_tokens
            assert 16 <= new <= 48


def test_sessions_share_the_system_prompt_and_nothing_else():
    first = [session[0] for session in by_session(of_sessions(20))]
    for one, other in itertools.combinations(first, 2):
        assert shared(one, other) == SHAPE.system_tokens // PAGE
        assert len(set(pages(one)) & set(pages(other))) == SHAPE.system_tokens // PAGE
    [other] = of_sessions(1, seed=1)[:1]
    assert shared(first[0], other) == 0


def test_requests_are_complete():
    for request in of_sessions(10):
        assert request.input_tokens == len(request.body["prompt"])
        assert request.body["max_tokens"] == SHAPE.answer_tokens


def test_turns_come_in_order_of_time_and_after_time_to_think():
    requests = of_sessions(1500, starts=poisson(0, 2.0))
    times = [request.at_s for request in requests]
    assert times == sorted(times)
    sessions = by_session(requests)
    assert [session[0].at_s for session in sessions] == list(
        itertools.islice(poisson(0, 2.0), 1500)
    )
    think = [b.at_s - a.at_s for session in sessions for a, b in itertools.pairwise(session)]
    error = SHAPE.think_s / math.sqrt(len(think))
    assert abs(statistics.fmean(think) - SHAPE.think_s) < 5 * error
    turns = [len(session) for session in sessions]
    error = math.sqrt((5**2 - 1) / 12 / len(turns))  # uniform from 1 to 5
    assert abs(statistics.fmean(turns) - SHAPE.turns) < 5 * error


def test_sessions_are_begun_as_their_requests_are_taken():
    taken = 0

    def starts():
        nonlocal taken
        for at in evenly(1.0):
            taken += 1
            yield at

    requests = SHAPE.requests(0, starts())
    last = [next(requests) for _ in range(300)][-1]
    assert taken <= last.at_s + 2


def test_the_same_seed_gives_the_same_conversations():
    assert of_sessions(20) == of_sessions(20) != of_sessions(20, seed=1)


@pytest.mark.parametrize("new", [1, 2, 3])
def test_a_new_part_has_at_least_one_token(new):
    requests = of_sessions(20, Conversations(0, new, 1, 2, 1.0))
    assert min(request.input_tokens for request in requests) >= 1
