"""Two engines with little room that wait for each other's pages do not deadlock."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e_faults import Alone, Lease, NoRoom, engines, kind_of, prompt_of, started
from e2e_scene import check_it_rests
from engine_process import EngineProcess

EACH_WAY = 12  # requests at a time; about three leases fit
AT_ONCE_S = 15.0  # includes slack for a busy machine; a lease outlives the test


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_two_engines_that_send_to_each_other_never_deadlock(alone: Alone) -> None:
    source = random.Random("room")
    flags = ("--pool-pages", "80", "--token-budget", "64", "--lease-ms", "60000")
    prompts = [prompt_of(f"room {n}", source.randrange(150, 500)) for n in range(2 * EACH_WAY)]
    wanted = [alone(prompt) for prompt in prompts]
    with engines(2, *flags) as running, ThreadPoolExecutor(len(prompts)) as crowd:
        pairs = [tuple(running), tuple(reversed(running))] * EACH_WAY
        answers = list(crowd.map(asked, pairs, prompts))
        assert [tokens for tokens, _ in answers] == wanted
        # Otherwise there was room for all, and the test shows nothing.
        assert sum(refusals for _, refusals in answers) > 0
        for engine in running:
            check_it_rests(engine)


def asked(pair: tuple[EngineProcess, EngineProcess], prompt: list[int]) -> tuple[list[int], int]:
    """Try one request until there is room; return its tokens and the number of refusals."""
    sender, receiver = pair
    wait = random.Random(len(prompt))
    refusals = 0
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        began = time.monotonic()
        try:
            lease = Lease(receiver, f"room {time.monotonic_ns()}", prompt, len(prompt) - 1)
            if lease.begin == lease.end:
                return started(lease), refusals
            reply = lease.send(sender)
            if kind_of(reply) == "ok":
                return started(lease), refusals
            lease.release()
            raise NoRoom(reply)
        except NoRoom:
            assert time.monotonic() - began < AT_ONCE_S
            refusals += 1
            # Retry sooner than Retry-After, so that the requests contend more.
            time.sleep(0.05 * wait.random())
    raise AssertionError("no room for a minute")
