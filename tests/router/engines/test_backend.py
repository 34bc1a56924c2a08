"""An engine as the router knows it: silence, loss, and the calls and streams that they end."""

from __future__ import annotations

import asyncio
import inspect
import json
from typing import Any

import pytest
from stub_engine import StubEngine, backend_of, model_info

from engine.protocol import ALL_CAPABILITIES
from router.base.errors import EngineUnreachable
from router.engines.backend import Backend, guard
from router.engines.load import STREAM_TOKENS, Load


class Stream:
    """A running generation that has sent `events`."""

    def __init__(self) -> None:
        self.events: int | None = 0
        self.aborted = ""

    def progress(self) -> int | None:
        return self.events

    def abort(self, reason: str = "given up") -> None:
        self.aborted = reason


async def up(id: str = "a", **tells: Any) -> Backend:
    engine = StubEngine(id, **tells)
    backend = backend_of(engine)
    backend.status, backend.state = "up", await engine.state()
    return backend


async def waiting(*backends: Backend, endless: bool = False) -> asyncio.Task[None]:
    """Begin a call that gets no answer."""
    call = guard(asyncio.Event().wait(), *backends, endless=endless)
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    return task  # type: ignore[return-value]


# Silence


async def test_a_silent_stream_beside_a_busy_one_is_ended():
    backend = await up()
    busy, silent = Stream(), Stream()
    for stream in (busy, silent):
        backend.watch(stream)
    for _ in range(11):  # the first look only begins to count
        busy.events += 1
        backend.end_silent(1.0, 10.0)
        assert not silent.aborted
    backend.end_silent(0.0, 10.0)  # ten seconds are not more than ten
    assert not silent.aborted
    busy.events += 1
    backend.end_silent(1.0, 10.0)
    assert "nothing about the request for more than 10 s" in silent.aborted
    assert not busy.aborted


async def test_any_event_begins_the_count_anew():
    backend = await up()
    stream = Stream()
    backend.watch(stream)
    for _ in range(5):
        for _ in range(9):
            backend.end_silent(1.0, 10.0)
        stream.events += 1
    stream.events = None  # no more can arrive: what has arrived is being read
    for _ in range(30):
        backend.end_silent(1.0, 10.0)
    assert not stream.aborted
    backend.unwatch(stream)
    backend.unwatch(stream)
    assert not backend._streams


@pytest.mark.parametrize("work", ["running", "waiting", "puts_in_flight"])
async def test_less_time_counts_while_the_engine_reports_work(work):
    backend = await up(**{work: 1})
    stream = Stream()
    backend.watch(stream)
    backend.end_silent(1.0, 10.0)
    backend.end_silent(200.0, 10.0)  # 20 times as long, as the help of the flag says
    assert not stream.aborted
    backend.end_silent(2.0, 10.0)
    assert stream.aborted


async def test_a_call_without_an_answer_fails_and_only_that_one():
    """Not those that it may leave unanswered, nor those that another engine has to answer."""
    backend, other = await up(), await up()
    call, endless, relayed = (
        await waiting(backend),
        await waiting(backend, endless=True),
        await waiting(other, backend),
    )
    for _ in range(2):
        backend.end_silent(5.0, 10.0)
    await asyncio.sleep(0)
    assert not call.done()
    backend.end_silent(0.5, 10.0)
    with pytest.raises(EngineUnreachable, match="nothing about the request"):
        await call
    assert not endless.done() and not relayed.done()
    other.end_silent(11.0, 10.0)
    with pytest.raises(EngineUnreachable, match="nothing about the request"):
        await relayed
    backend.go_down("gone")
    with pytest.raises(EngineUnreachable, match="went down: gone"):
        await endless
    assert not backend._calls and not other._calls


# Loss


async def test_the_loss_of_either_engine_ends_a_call():
    sender, receiver = await up(), await up()
    receiver.id = "receiver"
    call = await waiting(sender, receiver)
    receiver.go_down("it has gone")
    with pytest.raises(EngineUnreachable, match="engine receiver went down: it has gone"):
        await call
    assert not sender._calls and not receiver._calls
    late = asyncio.Event().wait()
    with pytest.raises(EngineUnreachable, match="engine receiver is down: it has gone"):
        await guard(late, sender, receiver)
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED
    assert not sender._calls
    assert await guard(asyncio.sleep(0, "answered"), sender) == "answered"
    assert not sender._calls


async def test_going_down_ends_all_that_is_there():
    class Replica:
        def __init__(self) -> None:
            self.lost: list[str] = []

        def lose(self, reason: str) -> None:
            self.lost.append(reason)
            backend.replicas.pop(self)  # type: ignore[call-overload]

    backend = await up()
    stream, replicas = Stream(), [Replica(), Replica()]
    backend.watch(stream)
    backend.replicas.update(dict.fromkeys(replicas))  # type: ignore[arg-type]
    doubts = backend.doubts
    backend.go_down("gone")
    assert "gone" in stream.aborted
    assert [replica.lost for replica in replicas] == [["gone"], ["gone"]]
    assert (backend.status, backend.last_error) == ("down", "gone")
    assert backend.doubts == doubts + 1
    late = Stream()
    backend.watch(late)
    assert late.aborted


async def test_only_an_engine_that_is_up_becomes_suspect():
    backend = await up()
    backend.settled.set()
    backend.suspect("no answer")
    assert (backend.status, backend.doubts, backend.last_error) == ("suspect", 1, "no answer")
    assert not backend.settled.is_set() and backend.probe.is_set()
    backend.go_down("gone")
    backend.settled.set()
    backend.suspect("no answer")
    assert (backend.status, backend.doubts) == ("down", 2)
    assert backend.last_error == "gone"  # its other legs, which say so too, add nothing
    assert backend.settled.is_set()


# Facts


def test_load_is_counted_while_the_work_runs():
    load = Load()
    with pytest.raises(KeyError), load.work(tokens=10, streams=1), load.work(streams=2):
        assert (load.tokens, load.streams, load.weight) == (10, 3, 10 + 3 * STREAM_TOKENS)
        assert not load.idle
        raise KeyError
    assert (load.tokens, load.streams, load.idle) == (0, 0, True)
    for work in ({"tokens": 1}, {"streams": 1}):
        with load.work(**work):
            assert not load.idle


def test_what_an_engine_reports_beyond_the_own_work_is_that_of_others():
    load = Load()
    load.listen()
    load.hear(500, 2)
    assert (load.others, load.weight) == (500 + 2 * STREAM_TOKENS, 0)
    assert load.total == 500 + 2 * STREAM_TOKENS
    with load.work(tokens=400, streams=1):
        load.listen()
        load.hear(500, 2)
        assert load.others == 100 + STREAM_TOKENS
    load.hear(None, None)  # an engine that does not count
    assert load.others == 0


async def test_work_that_was_given_up_is_the_own_until_the_engine_was_told():
    load, told = Load(), asyncio.get_running_loop().create_future()
    load.add(100, 1)
    load.end(100, 1, told)
    assert load.idle and load.weight == 0
    load.listen()
    load.hear(100, 1)
    assert load.others == 0
    told.set_result(None)
    await asyncio.sleep(0)
    load.listen()
    load.hear(100, 1)
    assert load.others == 100 + STREAM_TOKENS


def test_work_that_came_or_went_during_a_report_is_the_own():
    """The engine made the report at some time of that, so it may have counted it."""
    load = Load()
    with load.work(tokens=300, streams=1):
        load.listen()
    with load.work(tokens=100, streams=2):
        pass
    load.hear(300, 1)
    assert load.others == 0
    load.listen()
    with load.work(tokens=300, streams=1):
        pass
    load.hear(300, 1)
    assert load.others == 0
    load.listen()
    load.hear(300, 1)  # of nobody here
    assert load.others == 300 + STREAM_TOKENS


@pytest.mark.parametrize(
    ("change", "usable"),
    [
        ({}, True),
        ({"status": "suspect"}, False),
        ({"status": "unknown"}, False),
        ({"status": "down"}, False),
        ({"draining": True}, False),
        ({"leaving": True}, False),
        ({"state": None}, True),
    ],
)
async def test_which_engines_take_new_work(change, usable):
    backend = await up()
    for name, value in change.items():
        setattr(backend, name, value)
    assert backend.usable is usable
    assert not (await up(draining=True)).usable


@pytest.mark.parametrize(
    ("mine", "theirs", "exchange"),
    [("1", "1", True), ("1", "2", False), (None, "2", True), ("1", None, True), (None, None, True)],
)
async def test_which_engines_exchange_kv(mine, theirs, exchange):
    one, other = await up(secret_digest=mine), await up(secret_digest=theirs)
    assert one.exchanges_with(other) is exchange


async def test_a_description_keeps_digests_and_leases_to_itself():
    backend = await up(secret_digest="5ec4e7" * 4)
    text = json.dumps(backend.describe())
    assert "5ec4e7" not in text and "leases" not in text
    assert backend.describe()["last_error"] is None
    backend.warning = "odd"
    assert backend.describe()["last_error"] == "odd"
    backend.last_error = "worse"
    assert backend.describe()["last_error"] == "worse"


class Replica:
    """A replica on engine `id`."""

    def __init__(self, id: str, lag: int) -> None:
        self.backend = backend_of(StubEngine(id))
        self.lag = lag


async def test_what_a_description_says():
    new = backend_of(StubEngine("new"))
    assert new.describe() == {
        "id": "new:1", "url": "http://new:1", "role": "any", "labels": {}, "source": "flag",
        "status": "unknown", "draining": False, "leaving": False, "breaker": "closed",
        "model": None, "context_length": None, "page_size": None, "kv": None,
        "capabilities": None, "epoch": None,
        "load": {"tokens": 0, "streams": 0, "others": 0},
        "mirrored": {"requests": 0, "to": {}, "lag_tokens": 0}, "replicas": 0,
        "last_error": None, "state": None,
    }  # fmt: skip
    backend = await up("a", epoch=7)
    backend.model, backend.labels = model_info(), {"zone": "1"}
    backend.draining, backend.load.tokens, backend.load.streams = True, 5, 2
    replicas: Any = [Replica("b", 3), Replica("b", 9), Replica("c", 0)]
    backend.mirrored.update(dict.fromkeys(replicas))
    backend.replicas.update(dict.fromkeys(replicas[:2]))
    told = backend.describe()
    names = ("model", "context_length", "page_size", "kv", "epoch", "labels")
    assert {name: told[name] for name in names} == {
        "model": "fake", "context_length": 256, "page_size": 16, "kv": "f", "epoch": 7,
        "labels": {"zone": "1"},
    }  # fmt: skip
    assert told["capabilities"] == list(ALL_CAPABILITIES)
    assert (told["draining"], told["leaving"], told["replicas"]) == (True, False, 2)
    assert told["load"] == {"tokens": 5, "streams": 2, "others": 0}
    assert told["mirrored"] == {"requests": 3, "to": {"b:1": 2, "c:1": 1}, "lag_tokens": 9}
    assert told["state"]["engine_id"] == "a"
    backend.draining, backend.leaving = False, True
    told = backend.describe()
    assert (told["draining"], told["leaving"]) == (True, True)


async def test_a_context_holds_so_many_tokens():
    backend = await up()
    assert backend.holds(10**9)  # its model is not known yet
    backend.model = model_info(context_length=256)
    assert backend.holds(256) and not backend.holds(257)


async def test_a_loss_is_told_although_the_engine_is_up_again():
    first, second = await up("a"), await up("b")
    call = await waiting(first, second)
    second.go_down("it has gone")
    second.status = "up"  # before the caller has run
    with pytest.raises(EngineUnreachable, match="engine a:1 went down"):
        await call
