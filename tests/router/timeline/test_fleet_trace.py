"""The time line of a fleet: what stands where, and what the flow of a request connects."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec
import pytest
from chrome_trace_rules import read_trace

from engine.protocol import EngineTimeline, Unsupported
from router.base import EngineUnreachable
from router.engines.backend import Backend
from router.engines.circuit_breaker import CircuitBreaker
from router.telemetry import Leg, Receipt, Receipts
from router.timeline import (
    EngineWork,
    TracedPut,
    TracedRequest,
    TracedStep,
    ask_engines,
    fleet_trace,
    traced,
)


def receipt_of(id: str, now: list[float], legs: list[Leg]) -> Receipt:
    receipt = Receipt(
        id=id, generation=3, strategy="prefill_decode", params={}, seed=0, prompt_tokens=40,
        began=100.0, clock=lambda: now[0],
    )  # fmt: skip
    receipt.legs += legs
    return receipt


def leg(call: str, engine: str, start_ms: float, ms: float | None, **fields) -> Leg:
    name = fields.pop("request_id", "e1")
    return Leg(call, engine, name, 0, 1, 0, 40, start_ms, ms=ms, **fields)


LEGS = [
    leg("prep_recv", "d", 10.0, 5.0),
    leg("remote_send", "p", 20.0, 300.0, bytes=4000, sent_tokens=40, put_ms=20.0),
    leg("start_generate", "d", 330.0, None, first_token_ms=20.0),
]


def test_a_request_leads_from_its_slice_through_legs_steps_and_puts():
    receipt = receipt_of("mine", [101.0], LEGS)
    request = traced(receipt)
    assert request.seconds == 1.0  # it still runs
    engines = [
        EngineWork(
            "p", "prefill", [TracedStep(100.05, 0.2, 40, 0, ["e1", "stranger"])],
            [TracedPut(100.1, 0.2, 4000, "e1")],
        ),
        EngineWork("d", "decode", [TracedStep(100.34, 0.01, 1, 2, ["e1"])]),
    ]  # fmt: skip
    file = read_trace(b"".join(fleet_trace(engines, [request]).pieces({})))
    assert list(file.processes.values()) == ["requests", "p (prefill)", "d (decode)"]
    assert [one["name"] for one in file.joined(1)] == [
        "queue", "prep_recv", "remote_send", "prefill 40", "put to d", "start_generate",
        "decode 2 + 1",
    ]  # fmt: skip
    outer, *phases = file.of("requests", "requests")
    assert outer["name"] == "request mine" and outer["dur"] == 1e6
    assert outer["args"]["strategy"] == "prefill_decode"
    assert [one["name"] for one in phases] == ["queue", "prefill", "migration", "decode"]
    assert sum(one["dur"] for one in phases) == pytest.approx(1e6)
    (step,) = file.of("p (prefill)", "steps")
    assert step["args"]["requests"] == ["mine", "stranger"]
    (put,) = file.of("p (prefill)", "puts")
    assert put["args"] == {"bytes": 4000, "request": "mine"}
    (send,) = file.of("p (prefill)", "calls")
    assert send["args"]["request"] == "mine" and send["args"]["sent_tokens"] == 40


def test_engines_that_are_gone_have_the_legs_that_were_there():
    request = traced(receipt_of("mine", [101.0], [leg("start_generate", "lost", 0.0, 100.0)]))
    file = read_trace(b"".join(fleet_trace([], [request]).pieces({})))
    assert [one["name"] for one in file.of("lost (gone)", "calls")] == ["start_generate"]


def test_requests_travel_between_processes_unchanged():
    request = traced(receipt_of("mine", [101.0], LEGS))
    told = msgspec.msgpack.decode(msgspec.msgpack.encode([request]))
    assert msgspec.convert(told, list[TracedRequest]) == [request]


def test_the_latest_receipts_are_those_that_ran_in_the_time_asked_for():
    now, receipts = [200.0], Receipts(10)
    for id, ms in (("ended long ago", 1000.0), ("ended just now", 97_000.0), ("runs", None)):
        receipt = receipt_of(id, now, [])
        receipt.ms = ms
        receipts.add(receipt)
    assert [one.id for one in receipts.latest(5.0, 9)] == ["ended just now", "runs"]
    assert [one.id for one in receipts.latest(5.0, 1)] == ["runs"]
    assert len(receipts.latest(100.0, 9)) == 3


# Engines that tell their steps


@dataclass
class Client:
    """An engine whose clock is `ahead`, with these delays there and back, call by call."""

    ahead: float
    delays: list[tuple[float, float]]
    clock: object
    timeline_of: EngineTimeline | Exception | None = None
    asked: list[float] = field(default_factory=list)

    async def timeline(self, seconds: float) -> EngineTimeline:
        self.asked.append(seconds)
        if isinstance(self.timeline_of, Exception):
            raise self.timeline_of
        there, back = self.delays[len(self.asked) % len(self.delays)]
        await asyncio.sleep(there)
        now = self.clock() + self.ahead
        await asyncio.sleep(back)
        if not seconds or self.timeline_of is None:
            return EngineTimeline(now=now, steps=[], puts=[])
        return self.timeline_of


def backend(client: Client, **fields):
    made = Backend(client, CircuitBreaker(5, 5.0, lambda: 0.0), id="e")
    made.status = "up"
    return made


async def test_clocks_are_aligned_within_the_error_that_is_told():
    clock = asyncio.get_running_loop().time
    told = EngineTimeline(
        now=9002.0, steps=[(9000.0, 0.5, 7, 0, ["x"])], puts=[(9001.0, 0.25, 0.1, 64, "x")]
    )
    # Half of the round trip bounds the error however unequal there and back are.
    delays = [(0.05, 0.0), (0.0, 0.03), (0.004, 0.001), (0.02, 0.02)]
    client = Client(8000.0, delays, clock, told)
    (work,) = await ask_engines([backend(client)], 60.0, most=10, clock=clock)
    assert work.problem == "" and client.asked == [0.0, 0.0, 0.0, 0.0, 60.0]
    assert 0.002 < work.clock_error_s < 0.01
    (step,), (put,) = work.steps, work.puts
    assert abs(step.begin_s - 1000.0) <= work.clock_error_s
    assert abs(put.begin_s - 1001.0) <= work.clock_error_s
    assert (step.seconds, step.prompt_tokens, put.seconds, put.bytes) == (0.5, 7, 0.25, 64)


async def test_an_engine_that_tells_nothing_has_a_problem_and_a_track_without_steps():
    clock = asyncio.get_running_loop().time
    clients = [
        Client(0.0, [(0.0, 0.0)], clock, Unsupported("no")),
        Client(0.0, [(0.0, 0.0)], clock, EngineUnreachable("gone")),
    ]
    found = await ask_engines([*map(backend, clients)], 60.0, most=10, clock=clock)
    assert [one.problem for one in found] == ["it keeps no time line of its steps", "gone"]
    assert all(not one.steps for one in found)


async def test_of_many_steps_the_latest_are_kept():
    clock = asyncio.get_running_loop().time
    steps = [(float(n), 0.5, 0, 1, []) for n in range(100)]
    told = EngineTimeline(now=100.0, steps=steps, puts=[])
    clients = [Client(0.0, [(0.0, 0.0)], clock, told) for _ in range(4)]
    found = await ask_engines([*map(backend, clients)], 60.0, most=40, clock=clock)
    assert [len(one.steps) for one in found] == [10, 10, 10, 10]
    assert found[0].steps[-1].begin_s == pytest.approx(99.0, abs=1.0)


@pytest.mark.parametrize(
    ("began", "took"), [(0.0, 0.5), (1e12, 0.5), (1e6, 1e9), (1e6 - 3600.0, 3500.0)]
)
@pytest.mark.parametrize("kind", ["steps", "puts"])
async def test_an_engine_that_lies_about_times_does_not_hide_the_others(began, took, kind):
    """The file begins with its first slice: one of long ago would leave the rest no width."""
    clock = asyncio.get_running_loop().time
    lies = {"steps": [(began, took, 1, 0, [])], "puts": [(began, took, 0.0, 1, "x")]}
    told = EngineTimeline(**{"now": 1e6, "steps": [], "puts": [], kind: lies[kind]})
    client = Client(1e6 - clock(), [(0.0, 0.0)], clock, told)
    (work,) = await ask_engines([backend(client)], 60.0, most=10, clock=clock)
    assert "times" in work.problem and not work.steps and not work.puts
