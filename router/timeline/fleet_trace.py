"""The time line of a fleet: engines as processes, steps and puts as slices, requests as flows.

    requests             a slice for each request, divided into its phases
    engine-0 (prefill)   calls: the legs there, as the router saw them; steps; puts
    engine-1 (decode)    likewise

A request's flow leads from its slice through its legs, the steps that computed its prompt, and its
puts. Real and simulated fleets have the same time lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from router.timeline.chrome_trace import ChromeTrace, Slice
from router.timeline.requests import TracedLeg, TracedRequest

__all__ = ["EngineWork", "TracedPut", "TracedStep", "fleet_trace"]

CALLS, STEPS, PUTS = "calls", "steps", "puts"


class TracedStep(NamedTuple):
    """A step of an engine. `requests` are some of those whose prompts it computed."""

    begin_s: float
    seconds: float
    prompt_tokens: int
    decodes: int
    requests: Sequence[str] = ()


class TracedPut(NamedTuple):
    """A put. `target` is the engine that receives; empty: that of the request's lease."""

    begin_s: float
    seconds: float
    bytes: int
    request: str = ""
    target: str = ""


@dataclass(slots=True)
class EngineWork:
    """What an engine has computed and put. Times are on the clock of the requests."""

    id: str
    role: str
    steps: list[TracedStep] = field(default_factory=list)
    puts: list[TracedPut] = field(default_factory=list)
    clock_error_s: float = 0.0  # by which these times may be off
    problem: str = ""  # why there is nothing of it


def fleet_trace(engines: Sequence[EngineWork], requests: Iterable[TracedRequest]) -> ChromeTrace:
    """Return the time line, in which requests stand in the order given."""
    trace = ChromeTrace()
    builder = _Builder(trace)
    builder.add_engines([(one.id, one.role) for one in engines])
    for request in requests:
        builder.add_request(request)
    for engine in engines:
        builder.add_work(engine)
    builder.add_flows()
    return trace


class _Builder:
    def __init__(self, trace: ChromeTrace) -> None:
        self._trace = trace
        self._requests = trace.process("requests", ["requests"])
        self._processes: dict[str, int] = {}  # of engines, by id
        self._flows: list[list[Slice]] = []
        self._flow_of: dict[str, list[Slice]] = {}  # by the request id on engines
        self._name_of: dict[str, str] = {}  # of the client's request, likewise
        self._receiver_of: dict[str, str] = {}  # engine with the lease, likewise

    def add_engines(self, engines: Iterable[tuple[str, str]]) -> None:
        for id, role in engines:
            name = f"{id} ({role})" if role else id
            self._processes[id] = self._trace.process(name, [CALLS, STEPS, PUTS])

    def add_request(self, request: TracedRequest) -> None:
        first = self._trace.slice(
            self._requests, "requests", f"request {request.name}", request.begin_s,
            request.seconds, request.about, request.phases,
        )  # fmt: skip
        flow = [first]
        self._flows.append(flow)
        for leg in request.legs:
            self._add_leg(request, leg, flow)

    def _add_leg(self, request: TracedRequest, leg: TracedLeg, flow: list[Slice]) -> None:
        if leg.engine not in self._processes:
            self.add_engines([(leg.engine, "gone")])
        about = {"request": request.name, **leg.about}
        process = self._processes[leg.engine]
        flow.append(self._trace.slice(process, CALLS, leg.call, leg.begin_s, leg.seconds, about))
        if leg.request_id:
            self._flow_of[leg.request_id] = flow
            self._name_of[leg.request_id] = request.name
            if leg.call == "prep_recv":
                self._receiver_of[leg.request_id] = leg.engine

    def add_work(self, engine: EngineWork) -> None:
        process, trace, names = self._processes[engine.id], self._trace, self._name_of
        for step in engine.steps:
            about: dict[str, object] = {
                "prompt_tokens": step.prompt_tokens, "decodes": step.decodes
            }  # fmt: skip
            if step.requests:
                about["requests"] = [names.get(id, id) for id in step.requests]
            new = trace.slice(process, STEPS, _title(step), step.begin_s, step.seconds, about)
            self._connect(new, step.requests)
        for put in engine.puts:
            target = put.target or self._receiver_of.get(put.request, "")
            about = {"bytes": put.bytes}
            if put.request:
                about["request"] = names.get(put.request, put.request)
            name = f"put to {target}" if target else "put"
            new = trace.slice(process, PUTS, name, put.begin_s, put.seconds, about)
            self._connect(new, [put.request])

    def _connect(self, new: Slice, requests: Iterable[str]) -> None:
        for id in requests:
            if (flow := self._flow_of.get(id)) is not None:
                flow.append(new)

    def add_flows(self) -> None:
        for flow in self._flows:
            self._trace.flow(flow)


def _title(step: TracedStep) -> str:
    if not step.decodes:
        return f"prefill {step.prompt_tokens}"
    return f"decode {step.decodes}" + (f" + {step.prompt_tokens}" if step.prompt_tokens else "")
