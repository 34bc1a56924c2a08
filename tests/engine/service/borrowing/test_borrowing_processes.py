"""A debtor in this process, and creditors that are real engine processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from engine_process import EngineProcess

from engine.models import load_model
from engine.protocol import Creditor, LendCreditors
from engine.service.borrowing import Borrowing, BorrowingSettings
from kvcache.lease import Identity
from kvcache.lending import BorrowedBlock
from kvcache.remote_attention import AttentionShape, RemoteAttention
from kvcache.types import EngineId, LeaseId

pytestmark = pytest.mark.processes

BLOCK = 8  # pages
PAGES, CAP = 160, 80  # of a creditor: it lends ten blocks
LEASE_S = 2.0
PROMPT = [(7 * n) % 250 for n in range(40)]
FLAGS = ("--pool-pages", str(PAGES), "--lend-share", "0.5", "--lease-ms", str(int(LEASE_S * 1000)))
LONG = ("--lease-ms", "20000")  # loans that outlast each wait of a test
PROMPTLY = BorrowingSettings(
    call_s=0.4, rest_s=0.1, longest_rest_s=0.4, surplus_s=0.3, idle_s=0.6, stock=1
)


class Debtor:
    """A `Borrowing` and what it has told."""

    def __init__(self, like: EngineProcess, settings: BorrowingSettings = PROMPTLY) -> None:
        info = like.http.get("/microserving/model").json()
        config = load_model("tiny", dtype=torch.float32, device=torch.device("cpu")).config
        shape = AttentionShape(
            "float32", config.num_layers, config.num_heads, config.num_kv_heads,
            config.head_dim, info["page_size"],
        )  # fmt: skip
        identity = Identity(EngineId("d"), time.time_ns(), b"secret", info["fingerprint"])
        self.remote = RemoteAttention(identity, shape)
        self.borrowing = Borrowing(
            identity, self.remote, page_size=info["page_size"], settings=settings
        )
        self.ready = 0
        self.lost: list[tuple[str, str]] = []  # creditor, loan
        self.called_back: list[tuple[str, str]] = []
        self.borrowing.on_ready = self._on_ready
        self.borrowing.on_lost = lambda creditor, loans: self.lost.extend(
            (creditor, loan) for loan in loans
        )
        self.borrowing.on_called_back = lambda creditor, loans: self.called_back.extend(
            (creditor, loan) for loan in loans
        )

    def _on_ready(self) -> None:
        self.ready += 1

    def list(self, *creditors: EngineProcess) -> None:
        """Tell it whom to ask, as the router does."""
        rows = [
            Creditor(instance=state["engine_id"], epoch=state["epoch"], url=url, available=CAP)
            for url, state in ((each.url, each.state()) for each in creditors)
        ]
        self.borrowing.set_creditors(LendCreditors(creditors=rows))

    def blocks(self, count: int, within_s: float = 10.0) -> list[BorrowedBlock]:
        """Want so many blocks, and take them as they come."""
        self.borrowing.want(count)
        found: list[BorrowedBlock] = []
        give_up = time.monotonic() + within_s
        while len(found) < count:
            if (block := self.borrowing.take()) is not None:
                found.append(block)
                continue
            assert time.monotonic() < give_up, (found, self.borrowing.use())
            time.sleep(0.005)
        return found


def wait(condition: Callable[[], Any], within_s: float = 10.0) -> float:
    """Poll until `condition` holds; return how long it took, in seconds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + within_s
        time.sleep(0.01)
    return time.monotonic() - began


@pytest.fixture
def creditors() -> Iterator[Callable[..., EngineProcess]]:
    """Start creditors by name."""
    engines: list[EngineProcess] = []

    def start(name: str, *flags: str, **options: Any) -> EngineProcess:
        engines.append(EngineProcess(*FLAGS, "--engine-id", name, *flags, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.kill()


@pytest.fixture
def debtors() -> Iterator[Callable[..., Debtor]]:
    made: list[Debtor] = []

    def make(*args: Any) -> Debtor:
        made.append(Debtor(*args))
        return made[-1]

    yield make
    for debtor in made:
        debtor.borrowing.close()


def lent(engine: EngineProcess) -> int:
    return int(engine.state()["pages"]["lent"])


def test_blocks_come_are_renewed_and_go_back(creditors, debtors):
    creditor = creditors("a")
    debtor = debtors(creditor)
    debtor.borrowing.want(3)
    assert debtor.borrowing.take() is None  # it knows nobody
    debtor.list(creditor)
    wait(lambda: debtor.ready)
    blocks = debtor.blocks(3)
    assert debtor.borrowing.use().pages == {"a": 3 * BLOCK}
    pages = [page for block in blocks for page in block.pages]
    assert len(set(pages)) == 3 * BLOCK and {len(block.pages) for block in blocks} == {BLOCK}
    assert {(block.creditor, block.epoch) for block in blocks} == {("a", creditor.state()["epoch"])}
    assert debtor.remote.connected() == ["a"]
    time.sleep(2.5 * LEASE_S)  # longer than loans live without renewals
    assert lent(creditor) == 3 * BLOCK and not debtor.lost
    began = time.monotonic()
    for block in blocks:
        debtor.borrowing.give_back(block)
    again = debtor.blocks(2)
    if time.monotonic() - began < 0.2:  # loans without use are kept for 0.3 s
        assert {block.loan for block in again} <= {block.loan for block in blocks}
    for block in again:
        debtor.borrowing.give_back(block)
        debtor.borrowing.give_back(block)  # the second time changes nothing
    wait(lambda: lent(creditor) == 0)
    wait(lambda: debtor.borrowing.use().loans == 0)  # its creditor knows it first
    assert not debtor.lost
    creditor.at_rest()
    state = creditor.state()["lending"]
    assert state["debtors"] == 1 and state["endpoints"][0].startswith("unix:")


def test_many_blocks_come_in_larger_loans_and_go_back_when_it_closes(creditors, debtors):
    creditor = creditors("a", *LONG)
    debtor = debtors(creditor)
    debtor.list(creditor)
    blocks = debtor.blocks(10)
    loans = {block.loan for block in blocks}
    assert 1 < len(loans) < 10 and lent(creditor) == CAP
    assert {block.first for block in blocks if block.loan == blocks[0].loan} == {0, BLOCK}
    debtor.borrowing.want(1)
    time.sleep(0.5)
    assert debtor.borrowing.take() is None  # refused, and nothing is lost by it
    assert debtor.borrowing.use().refusals and lent(creditor) == CAP
    debtor.borrowing.close()
    wait(lambda: lent(creditor) == 0)


def test_a_creditor_that_refuses_is_followed_by_the_next_one(creditors, debtors):
    full, other = creditors("full", "--lend-share", "0.01"), creditors("b")
    debtor = debtors(full)
    debtor.list(full, other)
    assert {block.creditor for block in debtor.blocks(2)} == {"b"}


def test_a_call_back_is_told_and_the_loan_ends_when_its_blocks_are_back(creditors, debtors):
    creditor = creditors("a")
    debtor = debtors(creditor)
    debtor.list(creditor)
    blocks = debtor.blocks(10)

    def give_back(creditor: EngineId, loans: Sequence[LeaseId]) -> None:
        debtor.called_back.extend((creditor, loan) for loan in loans)
        for block in blocks:
            if block.loan in loans:
                debtor.borrowing.give_back(block)

    debtor.borrowing.on_called_back = give_back
    last = creditor.generate(PROMPT, max_tokens=(PAGES - CAP) * 16 + 64)[-1]
    assert last["finish_reason"] == "length"
    gone = {loan for _, loan in debtor.called_back}
    assert 0 < len(gone) < len({block.loan for block in blocks}) and not debtor.lost
    for block in blocks:
        debtor.borrowing.give_back(block)
    wait(lambda: lent(creditor) == 0)


def test_a_killed_creditor_is_noticed_soon_and_another_one_lends(creditors, debtors):
    one, other = creditors("a", *LONG), creditors("b")
    debtor = debtors(one)
    debtor.list(one, other)
    blocks = debtor.blocks(2)
    assert {block.creditor for block in blocks} == {"a"}
    one.signal(signal.SIGKILL)
    debtor.borrowing.failed(EngineId("a"))  # as after a step
    wait(lambda: len(debtor.lost) == 2)
    assert set(debtor.lost) == {("a", block.loan) for block in blocks}
    assert {block.creditor for block in debtor.blocks(2)} == {"b"}
    for block in blocks:
        debtor.borrowing.give_back(block)  # too late, and harmless
    assert debtor.borrowing.use().pages == {"b": 2 * BLOCK}


def test_a_killed_creditor_is_noticed_without_a_step(creditors, debtors):
    creditor = creditors("a", *LONG)
    debtor = debtors(creditor)
    debtor.list(creditor)
    debtor.blocks(1)
    creditor.signal(signal.SIGKILL)
    wait(lambda: debtor.lost)


def test_a_lost_exchange_loses_the_loans_and_frees_them(creditors, debtors):
    creditor = creditors("a", *LONG)
    debtor = debtors(creditor)
    debtor.list(creditor)
    (block,) = debtor.blocks(1)
    debtor.remote.disconnect(EngineId("a"))  # as after a step without an answer
    debtor.borrowing.failed(EngineId("a"))
    wait(lambda: debtor.lost)
    (again,) = debtor.blocks(1)
    assert again.loan != block.loan and debtor.remote.connected() == ["a"]
    wait(lambda: lent(creditor) == BLOCK)


def test_a_failed_step_of_a_creditor_that_lives_costs_only_loans_that_have_ended(
    creditors, debtors
):
    creditor = creditors("a")
    debtor = debtors(creditor)
    debtor.list(creditor)
    one, other = debtor.blocks(2)
    state = creditor.state()
    told = creditor.post(
        "lend/free",
        debtor="d",
        epoch=debtor.borrowing._identity.epoch,
        creditor_epoch=state["epoch"],
        lease_id=one.loan,
    )
    assert told.json()["freed_pages"] == BLOCK
    debtor.borrowing.failed(EngineId("a"))
    wait(lambda: debtor.lost)
    assert debtor.lost == [("a", one.loan)]
    time.sleep(2 * LEASE_S)
    assert len(debtor.lost) == 1 and lent(creditor) == BLOCK
    debtor.borrowing.give_back(other)


def test_a_stopped_creditor_hangs_nothing_and_its_pages_are_lost_at_the_deadline(
    creditors, debtors
):
    one, other = creditors("a"), creditors("b")
    debtor = debtors(one)
    debtor.list(one, other)
    (block,) = debtor.blocks(1)
    one.signal(signal.SIGSTOP)
    try:
        began = time.monotonic()
        debtor.borrowing.give_back(block)
        debtor.borrowing.want(2)
        assert time.monotonic() - began < PROMPTLY.call_s
        held = debtor.blocks(2)
        assert "b" in {block.creditor for block in held}
        if any(block.creditor == "a" for block in held):
            assert wait(lambda: debtor.lost) < 2 * LEASE_S
        wait(lambda: set(debtor.borrowing.use().pages) == {"b"})
    finally:
        one.signal(signal.SIGCONT)
    wait(lambda: lent(one) == 0)


def test_a_restarted_creditor_has_none_of_the_loans(creditors, debtors):
    creditor = creditors("a")
    debtor = debtors(creditor)
    debtor.list(creditor)
    (block,) = debtor.blocks(1)
    creditor.kill()
    again = creditors("a", port=creditor.port)
    debtor.list(again)
    wait(lambda: debtor.lost)
    (other,) = debtor.blocks(1)
    assert other.epoch > block.epoch and lent(again) == BLOCK
