"""`GET /microserving/timeline` of a real engine process."""

from __future__ import annotations

import time

import pytest
from engine_process import EngineProcess

from engine.protocol import EngineTimeline

pytestmark = pytest.mark.processes

PROMPT = [(11 * n) % 250 for n in range(300)]


def timeline(engine: EngineProcess, seconds: object = 60) -> EngineTimeline:
    reply = engine.http.get("/microserving/timeline", params={"seconds": str(seconds)})
    assert reply.status_code == 200, reply.text
    return EngineTimeline.model_validate_json(reply.content)


def test_steps_and_puts_are_told_with_their_times_and_requests(engine_process: EngineProcess):
    began = time.monotonic()  # the clock of all processes of a host
    lease = engine_process.post("prep_recv", request_id="t1", prompt=PROMPT, end=299).json()
    sent = engine_process.post(
        "remote_send", request_id="t1", prompt=PROMPT, begin=0, end=299, kv_addr=lease["kv_addr"]
    ).json()
    engine_process.post("release", lease_id=lease["lease_id"])
    engine_process.generate(PROMPT[::-1], request_id="t2", max_tokens=5)
    told = timeline(engine_process)
    assert began <= told.now <= time.monotonic()
    steps = [step for step in told.steps if step[0] >= began]
    computed = {name: sum(s[2] for s in steps if name in s[4]) for name in ("t1", "t2")}
    assert computed == {"t1": 299, "t2": 300}
    assert sum(step[3] for step in steps) == 4
    at = began
    for start, seconds, *_ in steps:
        assert start >= at
        at = start + seconds
    assert at <= told.now
    ((start, seconds, copying, size, request),) = [put for put in told.puts if put[0] >= began]
    assert (request, size) == ("t1", sent["bytes"])
    first = next(step for step in steps if "t1" in step[4])
    # Layer by layer: the first copy is made while the prompt is computed.
    assert first[0] <= start and 0 < copying <= seconds and start + seconds <= told.now
    engine_process.at_rest()


def test_the_time_is_what_was_asked_for_and_has_a_limit(engine_process: EngineProcess):
    engine_process.generate(PROMPT[:8])
    assert timeline(engine_process, 600).steps
    clock_alone = timeline(engine_process, 0)
    assert clock_alone.steps == clock_alone.puts == [] and clock_alone.now > 0
    for bad in ("-1", "601", "nan", "x", "1e99"):
        reply = engine_process.http.get("/microserving/timeline", params={"seconds": bad})
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "seconds", bad
