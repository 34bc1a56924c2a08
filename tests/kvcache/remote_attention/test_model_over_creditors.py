"""A model whose context lies in the pools of several processes computes the bits of one."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from creditors import EPOCH, SECRET, CreditorProcess, endpoint
from distributed_engine import CONTEXT, PAGE, DistributedEngine, tiny

from engine.models import Transformer
from kvcache.errors import PeerUnreachable, Timeout
from kvcache.lease import Identity
from kvcache.memory import KVLayout
from kvcache.remote_attention import AttentionShape, CreditorFailed, RemoteAttention
from kvcache.types import EngineId

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.usefixtures("one_thread")]

NAMES = ["one", "two", "three"]
epochs = count(1)  # of the debtor: what it borrowed in another test is free


def large(layout: KVLayout) -> KVLayout:
    """Return a pool with room for everything."""
    return layout.with_pages(4 * layout.pages)


@pytest.fixture(scope="module")
def model() -> tuple[Transformer, KVLayout]:
    return tiny()


@pytest.fixture
def start(model: tuple[Transformer, KVLayout]) -> Iterator[Callable[[str], CreditorProcess]]:
    started: list[CreditorProcess] = []

    def start_one(name: str) -> CreditorProcess:
        started.append(CreditorProcess(name, large(model[1]), model[0].config.num_heads))
        return started[-1]

    yield start_one
    for creditor in started:
        creditor.kill()


@pytest.fixture(scope="module")
def creditors(model: tuple[Transformer, KVLayout]) -> Iterator[list[CreditorProcess]]:
    started = [CreditorProcess(name, large(model[1]), model[0].config.num_heads) for name in NAMES]
    yield started
    for creditor in started:
        creditor.kill()


class Both:
    """One engine with all pages, and one whose blocks go to creditors, in the same steps."""

    def __init__(
        self,
        model: tuple[Transformer, KVLayout],
        creditors: list[CreditorProcess],
        kind: str = "unix",
        *,
        seed: int = 0,
        timeout_s: float = 20.0,
    ) -> None:
        loaded, layout = model
        self.rng = random.Random(seed)
        self.creditors = creditors
        self.epoch = next(epochs)
        me = Identity(EngineId("debtor"), self.epoch, SECRET, "same")
        shape = AttentionShape.of(layout, loaded.config.num_heads)
        self.remote = RemoteAttention(me, shape, timeout_s=timeout_s)
        for creditor in creditors:
            self.remote.connect(creditor.name, endpoint(creditor.endpoints, kind), EPOCH)
        self.whole = DistributedEngine(loaded, large(layout))
        self.split = DistributedEngine(loaded, layout, self.remote)
        self.loans = count(1)

    def lend_blocks(self, sequence: int, blocks: int) -> None:
        """Lend some of the full blocks, each to any creditor, in any order."""
        full = self.split.full_blocks(sequence)
        for block in self.rng.sample(full, min(blocks, len(full))):
            creditor = self.rng.choice(self.creditors)
            loan = f"{self.epoch}-{next(self.loans)}"
            self.split.lend_away(sequence, block, creditor, loan, self.epoch)

    def step(self, chunks: list[tuple[int, list[int]]]) -> list[int]:
        """Compute a step on both; return the tokens that follow greedily."""
        expected = self.whole.step(chunks)
        found = self.split.step(chunks)
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        tokens: list[int] = found.argmax(-1).tolist()
        return tokens

    def prefill(self, sequence: int, length: int) -> list[int]:
        """Compute a prompt in chunks of any length; blocks that fill up are lent at random."""
        prompt = [self.rng.randrange(500) for _ in range(length)]
        token = []
        while prompt:
            size = self.rng.choice([1, 50, 128, 200])
            chunk, prompt = prompt[:size], prompt[size:]
            token = self.step([(sequence, chunk)])
            self.lend_blocks(sequence, self.rng.randrange(3))
        return token


@pytest.mark.parametrize(
    ("seed", "kind", "holders"),
    [
        (0, "unix", 1),
        (1, "tcp", 2),
        (2, "unix", 3),
        *(pytest.param(seed, "unix", 3, marks=pytest.mark.thorough) for seed in range(3, 20)),
        *(pytest.param(seed, "tcp", 3, marks=pytest.mark.thorough) for seed in range(20, 30)),
    ],
)
def test_greedy_tokens_and_logits_are_those_of_one_process(
    model: tuple[Transformer, KVLayout],
    creditors: list[CreditorProcess],
    seed: int,
    kind: str,
    holders: int,
):
    """Three sequences, more than the debtor's pool holds; chunks of a fourth among decodes."""
    both = Both(model, creditors[:holders], kind, seed=seed)
    lengths = [both.rng.randint(200, 450) for _ in range(3)]
    tokens = {sequence: both.prefill(sequence, n) for sequence, n in enumerate(lengths)}
    prompt = [both.rng.randrange(500) for _ in range(300)]
    while prompt or both.whole.lengths[0] < lengths[0] + 12:
        chunk, prompt = prompt[:90], prompt[90:]
        chunks = list(tokens.items()) + ([(3, chunk)] if chunk else [])
        both.rng.shuffle(chunks)
        found = both.step(chunks)
        tokens = {own: [token] for (own, _), token in zip(chunks, found, strict=True) if own < 3}
        both.lend_blocks(both.rng.randrange(4), 1)
    assert sum(both.whole.lengths.values()) > CONTEXT
    assert both.split.borrowed
    both.remote.close()


def test_a_context_longer_than_the_pool(
    model: tuple[Transformer, KVLayout], creditors: list[CreditorProcess]
):
    """IL12: 1,400 tokens over a pool of 1,024, in the order in which they come."""
    both = Both(model, creditors)
    token: list[int] = []
    for at in range(0, 1400, 100):
        token = both.step([(0, [(at + i) % 500 for i in range(100)])])
        both.lend_blocks(0, 2)
    for _ in range(4):
        token = both.step([(0, token)])
    assert both.whole.lengths[0] > both.split.layout.pages * PAGE
    estimate = both.remote.estimate(both.creditors[0].name)
    assert estimate.s_per_row_key > 0  # a fast creditor's answers are there before they are read
    both.remote.close()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
def test_a_creditor_that_is_lost_in_a_step(
    model: tuple[Transformer, KVLayout],
    start: Callable[[str], CreditorProcess],
    kind: str,
    death: signal.Signals,
):
    """The error names it and its loans, in time, and the next step is right without it."""
    lost, other = start("lost"), start("other")
    both = Both(model, [lost, other], kind, timeout_s=3.0)
    for sequence, creditor in enumerate(both.creditors):
        both.step([(sequence, [(sequence + i) % 500 for i in range(150)])])
        both.split.lend_away(sequence, 0, creditor, f"loan-{sequence}", both.epoch)
    both.step([(0, [1]), (1, [2])])

    def in_layer(layer: int) -> None:
        if layer == 1:
            lost.signal(death)

    both.split.between_layers = in_layer
    began = time.monotonic()
    with pytest.raises(CreditorFailed) as caught:
        both.split.step([(0, [1]), (1, [2])])
    assert time.monotonic() - began < 3.0 + 5.0  # the timeout, and a slow machine
    failure = caught.value
    assert (failure.creditor, failure.loans, failure.lost) == ("lost", ("loan-0",), True)
    expected = PeerUnreachable if death == signal.SIGKILL else Timeout
    assert isinstance(failure.reason, expected)
    assert failure.also == ()
    assert both.remote.connected() == ["other"]

    both.split.between_layers = lambda layer: None
    both.step([(1, [2])])
    with pytest.raises(CreditorFailed, match="not connected"):
        both.split.step([(0, [1]), (1, [2])])
    both.step([(1, [3])])
    both.remote.close()


def test_a_creditor_that_stops_while_it_computes(
    model: tuple[Transformer, KVLayout], start: Callable[[str], CreditorProcess]
):
    """It goes on later, and its late answer harms nothing; connected anew, it answers again."""
    creditor = start("stopped")
    both = Both(model, [creditor], timeout_s=2.0)
    both.step([(0, list(range(150)))])
    both.split.lend_away(0, 0, creditor, "loan", both.epoch)
    creditor.call("stop_within_an_answer")
    with pytest.raises(CreditorFailed) as caught:
        both.split.step([(0, [1])])
    assert isinstance(caught.value.reason, Timeout)
    creditor.wait_until_stopped()
    creditor.signal(signal.SIGCONT)
    both.remote.connect(creditor.name, endpoint(creditor.endpoints, "unix"), EPOCH)
    for _ in range(3):
        both.step([(0, [1])])
    both.remote.close()
