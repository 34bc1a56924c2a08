"""The router dies between any two legs of a request: engines free everything by themselves, the
client is told at once, and the next router works."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from e2e_faults import NEW, Alone, Completion, Router, engines, prompt_of, until
from e2e_scene import check_it_rests
from engine_process import EngineProcess

pytestmark = pytest.mark.slow
TOKENS = 200


@dataclass
class Fleet:
    """A router before one engine that prefills and one that decodes, and a request."""

    prefill: EngineProcess
    decode: EngineProcess
    router: Router
    asked: Completion

    @property
    def landed(self) -> int:
        """Of the request's lease; -1 if there is none."""
        leases = self.decode.state()["leases"]
        return leases[0]["landed"] if leases else -1


@pytest.fixture(scope="module")
def pair() -> Iterator[list[EngineProcess]]:
    with engines(1, "--role", "prefill") as prefill, engines(1, "--role", "decode") as decode:
        yield prefill + decode


def after_prep_recv(fleet: Fleet) -> None:
    """The prefill engine is stopped, so the second leg has not begun."""
    until(lambda: fleet.landed == 0, "the lease")
    assert fleet.prefill.stopped


def during_remote_send(fleet: Fleet) -> None:
    until(lambda: fleet.landed > 0, "the first chunk")


def during_generation(fleet: Fleet) -> None:
    until(lambda: bool(fleet.asked.tokens), "the first token")


@pytest.mark.parametrize("moment", [after_prep_recv, during_remote_send, during_generation])
def test_the_router_is_killed(
    moment: Callable[[Fleet], None], pair: list[EngineProcess], alone: Alone
) -> None:
    prefill, decode = pair
    router = Router(pair)
    prompt = prompt_of(moment.__name__, 1000)
    try:
        if moment is after_prep_recv:
            prefill.signal(signal.SIGSTOP)
        fleet = Fleet(prefill, decode, router, Completion(router, prompt, TOKENS))
        moment(fleet)
        router.signal(signal.SIGKILL)
        assert not (fleet.asked.done and len(fleet.asked.tokens) == TOKENS)
        assert fleet.asked.outcome() == "cut"
        assert fleet.asked.tokens == alone(prompt, TOKENS)[: len(fleet.asked.tokens)]
        prefill.signal(signal.SIGCONT)
        # At once, on the same port, while the engines may still hold what the dead one left.
        with_new = Router(pair, port=router.port)
        try:
            again = Completion(with_new, prompt)
            assert again.outcome() == "ok"
            assert again.tokens == alone(prompt, NEW)
        finally:
            with_new.kill()
        for engine in pair:
            check_it_rests(engine)
    finally:
        prefill.signal(signal.SIGCONT)
        router.kill()
