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
LENGTH = 1500
TOKENS = 1000  # enough for many seconds


@dataclass
class Fleet:
    """A router with one prefill and one decode engine, and a request."""

    prefill: EngineProcess
    decode: EngineProcess
    router: Router
    asked: Completion

    @property
    def landed(self) -> int:
        """Return how many tokens of the request's lease have landed; -1 without a lease."""
        leases = self.decode.state()["leases"]
        return leases[0]["landed"] if leases else -1

    def until(self, condition: Callable[[], bool], what: str) -> None:
        until(lambda: condition() or self.asked.done, what)
        assert not self.asked.done, self.asked.outcome()

    # Waits for each moment, and checks that the engines have dropped the dead router's calls

    def until_prep_recv(self) -> None:
        """The prefill engine is stopped, so the second leg has not begun."""
        self.until(lambda: self.landed == 0, "the lease")
        assert self.prefill.stopped

    def until_remote_send(self) -> None:
        self.until(lambda: self.landed > 0, "the first chunk")

    def check_the_send_was_dropped(self) -> None:
        until(lambda: not self.prefill.state()["puts_in_flight"], "the send's end")
        assert self.prefill.state()["prefix_tokens"] == 0  # only a complete prefix is published

    def until_generation(self) -> None:
        self.until(lambda: bool(self.asked.tokens), "the first token")

    def check_the_generation_was_dropped(self) -> None:
        until(lambda: not self.decode.state()["running"], "the generation's end")
        assert self.decode.state()["prefix_tokens"] < LENGTH + TOKENS / 2

    def nothing_began(self) -> None:
        pass


MOMENTS = {
    "after prep_recv": (Fleet.until_prep_recv, Fleet.nothing_began),
    "during remote_send": (Fleet.until_remote_send, Fleet.check_the_send_was_dropped),
    "during generation": (Fleet.until_generation, Fleet.check_the_generation_was_dropped),
}


@pytest.fixture
def pair() -> Iterator[list[EngineProcess]]:
    with engines(1, "--role", "prefill") as prefill, engines(1, "--role", "decode") as decode:
        yield prefill + decode


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_router_is_killed(moment: str, pair: list[EngineProcess], alone: Alone) -> None:
    prefill, decode = pair
    reach, check = MOMENTS[moment]
    prompt = prompt_of(moment, LENGTH)
    router = Router(pair)
    try:
        if moment == "after prep_recv":
            prefill.signal(signal.SIGSTOP)
        fleet = Fleet(prefill, decode, router, Completion(router, prompt, TOKENS))
        reach(fleet)
        router.signal(signal.SIGKILL)
        assert fleet.asked.outcome() == "cut"
        prefill.signal(signal.SIGCONT)
        check(fleet)
        got = fleet.asked.tokens[:NEW]
        assert got == alone(prompt)[: len(got)]
        # The next router takes the port while the engines may still hold the dead one's leases.
        new = Router(pair, port=router.port)
        try:
            again = Completion(new, prompt)
            assert again.outcome() == "ok"
            assert again.tokens == alone(prompt)
        finally:
            new.kill()
        for engine in pair:
            check_it_rests(engine)
    finally:
        prefill.signal(signal.SIGCONT)
        router.kill()


def test_the_router_is_killed_while_it_replicates(alone: Alone) -> None:
    """The engine drops the generation when its stream breaks, and its replica with it."""
    prompt = prompt_of("replicated", 300)
    with engines(2) as pair:
        router = Router(pair, strategy="replicate")
        try:
            asked = Completion(router, prompt, TOKENS)

            def replicas() -> list[int]:
                leases = [lease for engine in pair for lease in engine.state()["leases"]]
                return [lease["landed"] for lease in leases]

            until(lambda: any(landed > len(prompt) for landed in replicas()), "the replica")
            until(lambda: bool(asked.tokens), "the first token")
            router.signal(signal.SIGKILL)
            assert asked.outcome() == "cut"
            for engine in pair:
                check_it_rests(engine)
            got = asked.tokens[:NEW]
            assert got and got == alone(prompt)[: len(got)]
        finally:
            router.kill()
