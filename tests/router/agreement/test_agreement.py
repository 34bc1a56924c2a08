"""Routers over one store in one process: any order of changes, a store that forgets."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from waiting import until

from router.agreement import Agreement
from router.agreement import agreement as agreement_module
from router.agreement import presence as module
from router.base import Conflict, StoreUnavailable, root_cause
from router.rollout import AuditLog, CanaryRules, Catalog, Rollout, Wanted
from router.rollout.canary import Canary
from router.store import Document, MemoryStore
from router.telemetry import Events, Metrics, Receipt

NAMES = ["data_parallel", "balanced", "prefill_decode"]
NUMBERS = itertools.count()
SOURCE = """
from router import strategy

@strategy
async def mine(request, cluster):
    yield
"""


class ForgetfulStore(MemoryStore):
    """A store that returns as it was some changes ago, as Redis may when it was killed."""

    def __init__(self) -> None:
        super().__init__(asyncio.get_running_loop().time, restore_s=0.02)
        self._past = [Document(0, b"")]

    async def commit(self, change: Any) -> Any:
        outcome = await super().commit(change)
        if outcome == "done":
            self._past.append(self._document)
        return outcome

    def forget(self, changes: int) -> None:
        """Lose the latest changes, the log and all sources."""
        del self._past[max(1, len(self._past) - changes) :]
        self._document = self._past[-1]
        self._log.entries.clear()
        self._sources.clear()
        self._changed()

    def put(self, value: bytes, *, newer: bool = True) -> None:
        """Put something else in the document's place."""
        self._document = Document(self._document.version + newer, value)
        self._changed()

    def corrupt(self, digest: str) -> None:
        self._sources[digest] = b"raise SystemExit"


@dataclass
class Peer:
    """One router, as far as it concerns agreement. `ran` lists the generations that it has run."""

    agreement: Agreement
    rollout: Rollout
    catalog: Catalog
    ran: list[tuple[int, str]] = field(default_factory=list)

    @property
    def number(self) -> int:
        return self.rollout.revisions.active.number

    def end(self, *, error: str = "") -> None:
        """End a request of the canary."""
        candidate = self.rollout.revisions.candidate
        assert candidate is not None
        receipt = Receipt("x", candidate.number, "s", {}, 0, 0)  # type: ignore[arg-type]
        receipt.status, receipt.first_token_ms = "done", 1.0
        if error:
            receipt.status, receipt.error = "failed", {"type": error, "message": ""}
        self.rollout.ended(candidate, receipt)


@asynccontextmanager
async def peers(
    store: MemoryStore, count: int, *, follow: bool = True
) -> AsyncIterator[list[Peer]]:
    """Routers of a store. Without `follow`, they look at it only when they change something."""
    made: list[Peer] = []
    async with asyncio.TaskGroup() as tasks:
        running = []
        for index in range(count):
            catalog, log = Catalog(), AuditLog()
            first = catalog["data_parallel"].bind({})
            rollout = Rollout(
                catalog, first, metrics=Metrics(), events=Events(), audit_log=log, strikes=3,
                shared=True,
            )  # fmt: skip
            peer = Peer(
                Agreement(store, rollout, catalog, log, f"r{index}-{next(NUMBERS)}"),
                rollout,
                catalog,
            )
            await peer.agreement.join(first)
            peer.ran.append((peer.number, first.strategy.name))
            _record(peer)
            if follow:
                running.append(tasks.create_task(peer.agreement.run()))
            made.append(peer)
        try:
            yield made
        finally:
            for task in running:
                task.cancel()


def _record(peer: Peer) -> None:
    events: Any = peer.rollout.events

    def publish(kind: str, /, **fields: Any) -> None:
        if kind == "swap":
            peer.ran.append((fields["generation"], fields["name"]))

    events.publish = publish


async def agreed(made: list[Peer]) -> int:
    """Wait until all run the same generation; return it."""
    await until(lambda: len({peer.number for peer in made}) == 1)
    return made[0].number


@pytest.mark.parametrize("seed", range(6))
async def test_any_history_is_one_sequence_for_all(seed: int):
    source = random.Random(seed)
    store = ForgetfulStore()
    async with peers(store, 3) as made:
        given: list[int] = []

        async def change() -> None:
            peer = source.choice(made)
            if source.random() < 0.2:
                try:
                    given.append((await peer.agreement.rollback("me")).revision.number)
                except Conflict:
                    return
            else:
                bound = peer.catalog[source.choice(NAMES)].bind({})
                given.append((await peer.agreement.activate("me", Wanted(bound))).revision.number)

        for _ in range(12):
            await asyncio.gather(*(change() for _ in range(source.randrange(1, 4))))
            if source.random() < 0.3:
                store.forget(source.randrange(1, 8))
                await asyncio.sleep(source.choice((0, 0.03)))
        number = await agreed(made)
        assert number == max(given)
        assert len(set(given)) == len(given)  # no number is given twice, whatever was forgotten
        for peer in made:
            numbers = [number for number, _ in peer.ran]
            assert numbers == sorted(set(numbers)), numbers
        named: dict[int, set[str]] = {}
        for number, name in (one for peer in made for one in peer.ran):
            named.setdefault(number, set()).add(name)
        assert all(len(names) == 1 for names in named.values())


async def test_a_swap_is_seen_by_all_when_it_returns():
    async with peers(MemoryStore(asyncio.get_running_loop().time), 3) as made:
        for number in range(2, 12):
            bound = made[number % 3].catalog[NAMES[number % 3]].bind({})
            changed = await made[number % 3].agreement.activate("me", Wanted(bound))
            assert (changed.revision.number, changed.pending) == (number, [])
            assert [peer.number for peer in made] == [number] * 3


async def test_all_routers_know_whether_there_is_something_to_roll_back():
    async with peers(MemoryStore(asyncio.get_running_loop().time), 2) as made:
        assert [peer.agreement.can_roll_back for peer in made] == [False, False]
        await made[0].agreement.activate("me", Wanted(made[0].catalog["balanced"].bind({})))
        await until(lambda: all(peer.agreement.can_roll_back for peer in made))
        await made[1].agreement.rollback("me")
        await until(lambda: not any(peer.agreement.can_roll_back for peer in made))


async def test_one_router_is_the_first_and_another_one_when_it_has_left():
    async with peers(MemoryStore(asyncio.get_running_loop().time), 3) as made:
        firsts = lambda: [peer.agreement.first for peer in made]  # noqa: E731
        await until(lambda: firsts() == [True, False, False])
        await made[0].agreement.leave()
        await until(lambda: firsts()[1:] == [True, False])


async def test_a_failing_canary_is_rolled_back_by_the_failures_of_all():
    async with peers(MemoryStore(asyncio.get_running_loop().time), 3) as made:
        rules = CanaryRules(percent=50.0, max_error_rate=0.1, min_requests=20)  # 2 may fail
        bound = made[0].catalog["balanced"].bind({})
        changed = await made[0].agreement.activate("me", Wanted(bound, rules=rules))
        assert all(isinstance(peer.rollout.revisions.canary, Canary) for peer in made)
        for peer in made:
            peer.end(error="internal")
        await until(lambda: all(peer.rollout.revisions.candidate is None for peer in made))
        assert [peer.number for peer in made] == [1] * 3
        for peer in made:
            told = peer.rollout.last_canary
            assert told is not None and told["decision"] == "rolled_back"
            assert (told["generation"], told["failed"]) == (changed.revision.number, 3)
        counted = [
            peer.rollout._metrics.registry.get_sample_value(
                "microserve_router_canaries_total", {"decision": "rolled_back"}
            )
            for peer in made
        ]
        assert sum(one or 0 for one in counted) == 1  # by the router that decided


async def test_a_strategy_that_blocks_one_router_is_dismissed_by_all():
    async with peers(MemoryStore(asyncio.get_running_loop().time), 2) as made:
        await made[0].agreement.activate("me", Wanted(made[0].catalog["balanced"].bind({})))
        for _ in range(3):
            made[1].rollout.revisions.active.add_violation("blocked", "it blocked")
        await until(lambda: [peer.number for peer in made] == [3, 3])
        active = [peer.rollout.revisions.active.bound.strategy.name for peer in made]
        assert active == ["data_parallel"] * 2
        last = (await made[0].agreement.entries())[-1]
        assert (last["what"], last["who"], last["router"]) == (
            "rollback",
            "router",
            made[1].agreement.name,
        )


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"garbage", "not one of microserve"),
        (b"\xff\xfe", "not one of microserve"),
        (b'{"schema": 1}', "not one of microserve"),
        (b'{"schema": 2, "more": 3}', "a later version of microserve"),
    ],
)
async def test_a_document_that_is_not_understood_changes_nothing_and_is_told(
    value: bytes, said: str
):
    store = ForgetfulStore()
    async with peers(store, 2) as made:
        store.put(value)
        await until(lambda: all(peer.agreement.store()["status"] == "unreadable" for peer in made))
        assert [peer.number for peer in made] == [1, 1]
        assert not any(peer.agreement.stale for peer in made)  # they go on with what they have
        bound = made[0].catalog["balanced"].bind({})
        with pytest.raises(StoreUnavailable, match=said):
            await made[0].agreement.activate("me", Wanted(bound))
        with pytest.raises(ExceptionGroup) as caught:
            async with peers(store, 1):
                pass
        assert said in str(root_cause(caught.value))
        store.forget(5)  # somebody deletes it
        await until(lambda: all(peer.agreement.store()["status"] == "ok" for peer in made))
        await made[0].agreement.activate("me", Wanted(bound))
        assert await agreed(made) > 1


async def test_the_others_do_not_wait_for_what_is_no_router():
    store = MemoryStore(asyncio.get_running_loop().time)
    async with peers(store, 1) as [peer]:
        await store.announce("routers", "evil", b"garbage", 60)
        bound = peer.catalog["balanced"].bind({})
        assert (await peer.agreement.activate("me", Wanted(bound))).pending == []
        await store.append(b"garbage")
        assert (await peer.agreement.entries())[-1]["what"] == "unreadable"


async def test_a_router_that_has_not_looked_for_long_looks_before_the_next_request(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module, "SEEN_S", 0.1)
    monkeypatch.setattr(agreement_module, "STALE_S", 0.1)
    store = MemoryStore(asyncio.get_running_loop().time)
    async with peers(store, 1, follow=False) as [sleeper], peers(store, 1) as [other]:
        bound = other.catalog["balanced"].bind({})
        changed = await other.agreement.activate("me", Wanted(bound))
        assert changed.pending == [sleeper.agreement.name]
        # When the reply to a swap has come, nobody begins a request under an older generation.
        assert sleeper.number == 1 and sleeper.agreement.stale
        requests = [asyncio.create_task(sleeper.agreement.confirm()) for _ in range(3)]
        await asyncio.sleep(0.01)
        assert not any(one.done() for one in requests)
        awake = asyncio.create_task(sleeper.agreement.run())
        await asyncio.gather(*requests)
        assert sleeper.number == 2
        awake.cancel()


async def test_a_source_with_another_hash_is_not_loaded():
    store = ForgetfulStore()
    async with peers(store, 1) as [peer]:
        loaded = peer.catalog.load(SOURCE, name="mine")
        await peer.agreement.loaded("me", loaded)
        assert "mine" in (await store.get()).value.decode()
        store.corrupt(loaded.source_sha256)
        async with peers(store, 1) as [other]:
            assert "another hash" in other.agreement.store()["cannot_load"]["mine"]
            changed = await peer.agreement.activate("me", Wanted(loaded.bind({})))
            # The one that activates it stores its own text again, which has the right hash.
            assert changed.revision.number == 2
            await agreed([peer, other])


async def test_numbers_that_only_a_dead_router_knows_are_not_given_again(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(module, "SEEN_S", 0.05)
    store = ForgetfulStore()
    async with peers(store, 1, follow=False) as [survivor]:
        async with peers(store, 1) as [doomed]:
            bound = doomed.catalog["balanced"].bind({})
            changed = await doomed.agreement.activate("me", Wanted(bound))
            assert (changed.revision.number, changed.pending) == (2, [survivor.agreement.name])
        store.forget(2)  # returns empty
        bound = survivor.catalog["prefill_decode"].bind({})
        changed = await survivor.agreement.activate("me", Wanted(bound))
        assert changed.revision.number > 2
        assert [name for _, name in survivor.ran] == ["data_parallel", "prefill_decode"]
