"""Which engines a registry has, which are usable, and what a restart means, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from stub_engine import StubEngine, model_info
from virtual_time import in_virtual_time

from router.base.config import RouterConfig
from router.base.errors import Conflict, EngineUnreachable, NoEngines, NotFound
from router.engines import registry as module
from router.engines.backend import Backend
from router.engines.engines_file import EngineEntry
from router.engines.registry import Registry
from router.telemetry import Events, Metrics

CHECK_S = 0.51  # after this long every engine that is up was checked once more


class Fleet:
    """A registry of stubs, its engines by id, and what it has published."""

    def __init__(self, tasks: asyncio.TaskGroup, **config: Any) -> None:
        self.engines: dict[str, StubEngine] = {}
        self.published: list[tuple[str, str]] = []
        self.drained: list[Backend] = []
        settings = {"breaker_open_s": 1000.0, **config}
        events: Any = self
        self.registry = Registry(
            RouterConfig(**settings), self._connect, tasks, events, on_drain=self._drain
        )

    def __getitem__(self, id: str) -> Backend:
        return self.registry[id]

    def publish(self, event: str, /, **fields: Any) -> None:
        assert event == "engine"
        self.published.append((fields["id"], fields["status"]))

    def _connect(self, url: str) -> Any:
        id = url.split("//")[-1].split(":")[0]
        return self.engines.setdefault(id, StubEngine(id))

    def _drain(self, backend: Backend) -> int:
        self.drained.append(backend)
        return 7

    def usable(self) -> str:
        return " ".join(backend.id for backend in self.registry.usable())

    def fails(self, id: str) -> None:
        async def fail() -> None:
            raise EngineUnreachable("gone")

        self.engines[id].does["health"] = fail


@asynccontextmanager
async def fleet(*ids: str, **config: Any) -> AsyncIterator[Fleet]:
    """A fleet whose engines have been checked once."""
    async with asyncio.TaskGroup() as tasks:
        made = Fleet(tasks, **config)
        for id in ids:
            made.registry.add(f"http://{id}:1")
        await made.registry.settled(10.0)
        try:
            yield made
        finally:
            made.registry.close()


class Replica:
    def __init__(self) -> None:
        self.lost: list[str] = []
        self.asked = 0

    def lose(self, reason: str) -> None:
        self.lost.append(reason)

    def unwanted(self) -> None:
        self.asked += 1


# Restarts


@in_virtual_time
async def test_a_restart_closes_the_breaker_and_loses_the_replicas():
    async with fleet("a") as f:
        backend, replica = f["a"], Replica()
        while not backend.breaker.failure():
            pass
        backend.replicas[replica] = None  # type: ignore[index]
        await asyncio.sleep(3 * CHECK_S)  # the same process: what has failed counts
        assert (backend.breaker.state, replica.lost) == ("open", [])
        f.engines["a"].tells["epoch"] = 2
        await asyncio.sleep(CHECK_S)
        assert (backend.breaker.state, replica.lost) == ("closed", ["restarted"])
        f.engines["a"].tells |= {"epoch": 1, "engine_id": "b"}  # clocks may be set back
        backend.replicas = {replica}  # type: ignore[arg-type]
        await asyncio.sleep(2.0)
        assert (replica.lost, backend.id) == (["restarted"] * 2, "b")
        assert f.published == [("a", "up")]  # it was up all the time


@in_virtual_time
async def test_an_engine_keeps_its_id_until_its_process_ends():
    async with fleet("a", "b") as f:
        a, b = f["a"], f["b"]
        f.engines["b"].tells["engine_id"] = "c"
        await asyncio.sleep(CHECK_S)
        assert b.id == "b"
        f.engines["b"].tells |= {"engine_id": "a", "epoch": 2}
        await asyncio.sleep(CHECK_S)
        assert (a.id, b.id) == ("a", "b")  # the name is another's
        f.engines["b"].tells["engine_id"] = "c"
        await asyncio.sleep(CHECK_S)
        assert (a.id, b.id) == ("a", "c")
        with pytest.raises(NotFound):
            f["b"]


# Health


@in_virtual_time
async def test_changes_of_health_are_published_once():
    async with fleet("a", "b") as f:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.Event().wait()
        assert f.published == [("a", "up"), ("b", "up")]
        f.fails("a")
        await asyncio.sleep(20.0)
        assert f.published[2:] == [("a", "down")]
        assert (f["a"].last_error, f.usable()) == ("gone", "b")
        f["a"].client.does.clear()  # type: ignore[attr-defined]
        f["a"].probe.set()  # not after its long pause
        await asyncio.sleep(0.5)
        assert f.published[3:] == [("a", "up")]
        assert (f["a"].last_error, f.usable()) == ("", "a b")


@in_virtual_time
async def test_waiting_for_an_engine_ends_when_one_is_up():
    loop = asyncio.get_running_loop()
    async with fleet("a") as f:
        await f.registry.returned(60.0)
        await f.registry.settled(60.0)
        f.fails("a")
        await asyncio.sleep(30.0)
        began = loop.time()
        await f.registry.returned(2.0)
        assert (f.usable(), loop.time() - began) == ("", 2.0)
        f["a"].client.does.clear()  # type: ignore[attr-defined]
        loop.call_later(1.0, f["a"].probe.set)
        await f.registry.returned(60.0)
        assert f.usable() == "a" and loop.time() - began < 4.0
        f["a"].suspect("no answer")
        f.fails("a")
        began = loop.time()
        await f.registry.settled(60.0)  # until a check has decided
        assert f["a"].status == "down" and 1.9 < loop.time() - began < 2.1


@in_virtual_time
async def test_no_model_is_served_before_an_engine_has_answered():
    async with fleet() as f:
        with pytest.raises(NoEngines):
            assert f.registry.model
        f.registry.add("http://a:1")
        await f.registry.settled(10.0)
        assert f.registry.model.info == model_info()


# Choice


@in_virtual_time
async def test_no_exclusion_leaves_a_request_without_an_engine():
    async with fleet("a", "b", "c") as f:
        a, b, c = f["a"], f["b"], f["c"]
        assert f.registry.usable() == [a, b, c]
        assert f.registry.usable(without={a}) == [b, c]
        assert f.registry.usable(without={a, b, c}) == [a, b, c]
        while not a.breaker.failure():
            pass
        assert f.registry.usable() == [b, c]
        assert f.registry.usable(without={b, c}) == [b, c]  # a failure is better than an open one
        for backend in (b, c):
            while not backend.breaker.failure():
                pass
        assert f.registry.usable(without={b}) == [a, c]
        b.status = c.status = "suspect"
        assert f.registry.usable() == [a]
        a.leaving = True
        assert f.registry.usable(without=()) == []


@in_virtual_time
async def test_the_ring_begins_after_an_engine_and_has_only_usable_ones():
    async with fleet("a", "b", "c", "d") as f:
        a, b, c, d = f.registry
        assert f.registry.ring(a) == [b, c, d]
        assert f.registry.ring(c) == [d, a, b]
        assert f.registry.ring(d) == [a, b, c]
        d.draining = True
        assert f.registry.ring(c) == [a, b]
        stranger: Any = object()
        assert f.registry.ring(stranger)[0] is b
        turns = [f.registry.turn(pool) for pool in ("x", "x", "y", "x")]
        assert turns == [0, 1, 0, 2]


# Registration


@in_virtual_time
async def test_who_sets_a_role():
    async with fleet("a") as f:
        url, a = "http://a:1/", f["a"]
        roles = []
        for source, role in (
            ("heartbeat", "decode"), ("heartbeat", None), ("admin", "prefill"),
            ("heartbeat", "decode"), ("admin", "any"), ("admin", None),
        ):  # fmt: skip
            assert f.registry.add(url, role=role, source=source) is a
            now = a.role
            await asyncio.sleep(CHECK_S)
            roles.append((now, a.role))
        assert roles == [
            # A heartbeat's role counts until the engine's own report; an admin's stays.
            ("decode", "any"), ("any", "any"), ("prefill", "prefill"),
            ("prefill", "prefill"), ("any", "any"), ("any", "any"),
        ]  # fmt: skip


@in_virtual_time
async def test_who_sets_labels():
    async with fleet("a") as f:
        url, a = "http://a:1", f["a"]
        labels = []
        for source, given in (
            ("heartbeat", {"n": "1"}), ("heartbeat", {"n": "2"}), ("heartbeat", None),
            ("admin", {"n": "3"}), ("heartbeat", {"n": "4"}), ("file", {"n": "5"}),
            ("heartbeat", {"n": "6"}), ("admin", {}),
        ):  # fmt: skip
            f.registry.add(url, labels=given, source=source)
            labels.append(a.labels.get("n"))
        assert labels == ["1", "2", "2", "3", "3", "5", "5", None]


@in_virtual_time
async def test_an_engine_that_is_added_again_stays_and_is_checked_at_once():
    async with fleet("a") as f:
        a = f["a"]
        a.load.streams = 1
        f.registry.remove(a)
        await asyncio.sleep(0.01)
        assert a.leaving and not f.usable() and not a.probe.is_set()
        f.registry.add("http://a:1")
        assert not a.leaving and a.probe.is_set()
        await asyncio.sleep(0.01)
        assert f.usable() == "a" and not a.probe.is_set()
        f.registry.add("http://a:1")
        assert not a.probe.is_set()  # it is up


@in_virtual_time
async def test_the_memory_of_removed_engines_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST_REMOVED", 2)
    async with fleet("a", "b", "c") as f:
        for backend in list(f.registry):
            f.registry.remove(backend, for_good=True)
        assert not list(f.registry)
        for id in "bc":
            with pytest.raises(Conflict, match="administrator removed"):
                f.registry.add(f"http://{id}:1/", source="heartbeat")
        f.registry.add("http://a:1", source="heartbeat")  # the oldest is forgotten
        f.registry.add("http://c:1")  # no heartbeat
        f.registry.add("http://c:1", source="heartbeat")
        assert [backend.url for backend in f.registry] == ["http://a:1", "http://c:1"]


@in_virtual_time
async def test_an_idle_engine_is_forgotten_at_once_and_a_busy_one_later():
    async with fleet("a", "b") as f:
        a, b, engines = f["a"], f["b"], f.engines
        b.load.streams = 1
        assert f.registry.remove(a) == 0
        assert (list(f.registry), f.drained, engines["a"].closed) == ([b], [], 1)
        asked = engines["a"].asked["health"]
        f.registry.add("http://c:1")
        await f.registry.settled(10.0)
        replica = Replica()
        b.replicas[replica] = None  # type: ignore[index]
        assert f.registry.remove(b) == 7
        assert (f.drained, replica.asked) == ([b], 1)
        await asyncio.sleep(5.0)
        assert b in list(f.registry) and not engines["b"].closed
        b.load.streams = 0
        await asyncio.sleep(CHECK_S)
        assert b not in list(f.registry) and engines["b"].closed == 1
        assert engines["a"].asked["health"] == asked  # its monitor has ended


@in_virtual_time
async def test_the_last_engine_is_not_emptied():
    """There is nowhere to go."""
    async with fleet("a", "b") as f:
        a, b = f["a"], f["b"]
        replica = Replica()
        b.replicas[replica] = None  # type: ignore[index]
        assert (f.registry.drain(a, True), f.registry.drain(a, False)) == (7, 0)
        assert not a.draining and f.drained == [a]
        f.registry.drain(a, True)
        f.drained.clear()
        assert f.registry.drain(b, True) == 0
        assert (f.drained, replica.asked, b.draining) == ([], 0, True)


@in_virtual_time
async def test_only_an_engine_that_announced_itself_and_is_silent_is_forgotten():
    async with fleet("a", forget_s=20.0) as f:
        f.registry.add("http://b:1", source="heartbeat")
        await f.registry.settled(10.0)
        await asyncio.sleep(30.0)  # it is up
        assert f.usable() == "a b"
        for id in "ab":
            f.fails(id)
        f.registry.add("http://b:1", source="heartbeat")
        await asyncio.sleep(18.0)
        f["b"].load.streams = 1
        await asyncio.sleep(10.0)
        assert len(list(f.registry)) == 2  # something still runs there
        f["b"].load.streams = 0
        await asyncio.sleep(10.0)
        assert [backend.id for backend in f.registry] == ["a"]


@in_virtual_time
async def test_the_engines_file_rules_over_its_own_engines_only():
    async with fleet("flag") as f:
        f.registry.follow([EngineEntry("http://a:1", "prefill", {"n": "1"}),
                           EngineEntry("http://b:1"), EngineEntry("http://flag:1")])  # fmt: skip
        await f.registry.settled(10.0)
        assert (f["a"].role, f["a"].labels, f["b"].labels) == ("prefill", {"n": "1"}, {})
        f.registry.add("http://b:1", labels={"n": "9"}, source="admin")
        f.registry.follow([EngineEntry("http://a:1"), EngineEntry("http://b:1")])
        assert f["a"].labels == {}  # the file took back what it had given
        assert f["b"].labels == {"n": "9"}  # but not what an admin has given
        f.registry.follow([EngineEntry("http://b:1")])
        assert {backend.id for backend in f.registry} == {"flag", "b"}
        assert f.engines["a"].closed == 1
        f.registry.add("http://a:1", source="heartbeat")  # it may announce itself
        assert len(list(f.registry)) == 3


# Metrics


@in_virtual_time
async def test_metrics_are_those_of_the_engines_there_are():
    async with fleet("a", "b") as f:
        metrics = Metrics()
        while not f["b"].breaker.failure():
            pass
        f["a"].load.tokens = 100
        f["b"].draining = True
        f.registry.set_gauges(metrics)
        text = metrics.render().decode()
        for line in (
            'engine_up{engine="a"} 1.0', 'engine_up{engine="b"} 0.0',
            'engine_load{engine="a"} 100.0', 'engine_load{engine="b"} 0.0',
            'breaker_state{engine="a"} 0.0', 'breaker_state{engine="b"} 2.0',
        ):  # fmt: skip
            assert f"microserve_router_{line}\n" in text
        f.registry.remove(f["b"])
        f.registry.set_gauges(metrics)
        assert 'engine="b"' not in metrics.render().decode()


def test_events_are_published_under_these_names():
    """The stub above takes what `Events` takes."""
    Events().publish("engine", id="a", status="up")


# What a change concerns


@in_virtual_time
async def test_equal_epochs_are_one_process():
    async with fleet("e1", "e2") as f:
        a, engine, replica = f["e1"], f.engines["e1"], Replica()

        async def report() -> None:
            engine.tells["epoch"] = int("1000")  # a number of its own in each report

        engine.does["state"] = report
        await asyncio.sleep(2.0)  # until its model was read again
        a.replicas[replica] = None  # type: ignore[index]
        engine.tells["engine_id"] = "another"
        f.engines["e2"].tells |= {"engine_id": "".join(["e", "1"]), "epoch": 2}
        await asyncio.sleep(5.0)
        assert a.id == "e1" and not replica.lost
        assert {backend.id for backend in f.registry} == {"e1", "e2"}  # the name is taken


@in_virtual_time
async def test_secrets_are_compared_whenever_one_comes_goes_or_changes():
    compared = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compare_secrets", lambda engines: compared.append([*engines]))
        async with fleet("a", "b") as f:
            counts = [len(compared)]
            steps = (
                lambda: None,
                lambda: f.engines["a"].tells.update(secret_digest="1" * 16),
                lambda: None,
                lambda: f.fails("a"),
                f.engines["a"].does.clear,
                lambda: None,
            )
            for step in steps:
                step()
                f["a"].probe.set()
                await asyncio.sleep(10.0)
                counts.append(len(compared))
            assert [b - a for a, b in itertools.pairwise(counts)] == [0, 1, 0, 1, 1, 0]
            assert counts[0] == 2 and compared[-1] == [f["a"], f["b"]]


@in_virtual_time
async def test_contexts_decide_who_is_usable_and_a_removal_changes_them():
    async with fleet() as f:
        for id, context in (("a", 256), ("b", 64), ("c", 128)):
            f.engines[id] = StubEngine(id, info=model_info(context_length=context))
            f.registry.add(f"http://{id}:1")
        await f.registry.settled(10.0)
        a, b, c = f.registry
        served = f.registry.model
        assert served.contexts == [64, 128, 256]
        usable = {holding: f.registry.usable(holding=holding) for holding in (64, 65, 129, 257)}
        assert usable == {64: [a, b, c], 65: [a, c], 129: [a], 257: []}
        f.registry.remove(b)
        assert served.contexts == [128, 256]


@in_virtual_time
async def test_prefixes_are_followed_as_long_as_their_engine_is_there():
    forgotten: list[Backend] = []
    closed: list[bool] = []
    async with fleet("a", "b") as f:
        a = f["a"]
        prefixes: Any = SimpleNamespace(forget=forgotten.append, close=lambda: closed.append(True))
        f.registry.prefixes = prefixes
        f.registry.remove(a)
        assert forgotten == [a] and not closed
    assert closed == [True]


@in_virtual_time
async def test_without_relocation_a_drained_engine_keeps_its_requests():
    async with asyncio.TaskGroup() as tasks:
        engines: Any = {f"http://{id}:1": StubEngine(id) for id in "ab"}
        registry = Registry(RouterConfig(), engines.__getitem__, tasks, Events())
        for url in engines:
            registry.add(url)
        await registry.settled(10.0)
        assert registry.drain(registry["a"], True) == 0 and registry["a"].draining
        registry.close()


@in_virtual_time
async def test_an_engine_is_silent_for_more_than_the_limit_before_it_is_forgotten():
    loop = asyncio.get_running_loop()
    async with fleet(forget_s=20.0) as f:
        backend = f.registry.add("http://b:1", source="heartbeat")
        await f.registry.settled(10.0)
        backend.status, backend.heartbeat = "down", loop.time() - 20.0
        assert loop.time() - backend.heartbeat == 20.0
        assert not f.registry._has_left(backend) and not backend.leaving
        backend.heartbeat -= 1.0
        backend.load.streams = 1
        assert not f.registry._has_left(backend) and backend.leaving
        backend.load.streams = 0
        backend.heartbeat = loop.time()
        assert f.registry._has_left(backend)
        backend.leaving, backend.status = False, "up"
        assert not f.registry._has_left(backend)
