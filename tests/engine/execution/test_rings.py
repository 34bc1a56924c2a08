"""Debts in a ring are repaid in mid-decode (DGFM), and no token or logit changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from long_contexts import check_as_one_engine
from rings import BLOCK_AND_A_PAGE, Ring

from kvcache.remote_attention import MeasuredFetchCost

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

PAGES, LENT = 64, 40
TOKENS = 20


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Ring]]:
    """Make rings in which blocks come home by order only."""
    monkeypatch.setattr(MeasuredFetchCost, "cheaper", lambda *_: False)
    made: list[Ring] = []

    def make(members: int) -> Ring:
        made.append(Ring(members, PAGES, LENT))
        return made[-1]

    yield make
    for one in made:
        try:
            one.check()
        finally:
            one.close()


def in_debt(made: Ring) -> int:
    """Begin generations that owe blocks to each other; return how many each of them owes."""
    made.begin(700, max_tokens=TOKENS, tokens=3)
    owed = min(member.owed for member in made.members)
    assert owed >= 2
    return owed


@pytest.mark.parametrize("members", [2, 3])
def test_a_full_ring_with_one_spare_block_repays_itself(ring: Callable[[int], Ring], members: int):
    """Every pool is full but one: the pages that a block leaves are those for the next one."""
    made = ring(members)
    owed = in_debt(made)
    for member in made.members:
        member.leave(4)  # what the generations grow by
        assert member.pool < BLOCK_AND_A_PAGE
    made.members[0].leave(BLOCK_AND_A_PAGE + 4)
    for member in made.members:
        member.bring_home(owed)
    made.step_until(lambda: all(member.done for member in made.members))
    assert all(produced < TOKENS for produced in made.produced())
    for member, job in zip(made.members, made.jobs, strict=True):
        assert member.order is not None and member.order.home == owed
        assert member.elsewhere.home == {"swap": owed}
        assert member.elsewhere.away(job.seq_id) == member.owed
        member.leave(20)
    moved = [member.elsewhere.moved for member in made.members]
    made.finish()
    assert [member.elsewhere.moved for member in made.members] == moved  # they stay at home
    for member, job in zip(made.members, made.jobs, strict=True):
        check_as_one_engine(member.engine, [job])
        assert member.engine.stepper.stats.lost_blocks == 0


def test_a_full_ring_without_a_spare_block_stays_as_it_is(ring: Callable[[int], Ring]):
    made = ring(2)
    owed = in_debt(made)
    for member in made.members:
        member.leave(4)
        member.bring_home(owed)
    made.step_until(lambda: min(made.produced()) >= 12)
    for member in made.members:
        assert member.order is not None and (member.order.home, member.done) == (0, 0)
        member.elsewhere.cancel_order(member.order)
    made.finish()
    for member, job in zip(made.members, made.jobs, strict=True):
        check_as_one_engine(member.engine, [job])
