"""An engine that is stopped with `--drain` hands its streams over before it ends."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator

import pytest
from engine_process import EngineProcess
from router_process import RouterProcess, until

pytestmark = [pytest.mark.processes, pytest.mark.slow]
PROMPT = list(range(1, 41))


@pytest.fixture
def router() -> Iterator[RouterProcess]:
    process = RouterProcess([], "data_parallel")
    yield process
    process.kill()


def engine(id: str, router: RouterProcess | None, *flags: str) -> EngineProcess:
    at = ("--router", router.url) if router is not None else ()
    return EngineProcess("--engine-id", id, *at, *flags, model="mock")


def running_at(router: RouterProcess) -> dict[str, int]:
    listed = router.http.get("/admin/engines").json()["engines"]
    return {one["id"]: (one.get("state") or {}).get("running", 0) for one in listed}


def tokens(stream) -> Iterator[list[int]]:
    for line in stream.iter_lines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            assert "error" not in event, event
            yield from (choice["token_ids"] for choice in event["choices"])


def test_streams_move_and_nothing_is_retried_as_lost(router):
    engines = {id: engine(id, router, "--drain-s", "20") for id in "ab"}
    try:
        until(lambda: router.http.get("/health").json()["engines"]["up"] == 2)
        body = {"prompt": PROMPT, "max_tokens": 150, "stream": True, "return_token_ids": True,
                "ignore_eos": True, "temperature": 0}  # fmt: skip
        with router.http.stream("POST", "/v1/completions", json=body) as reply:
            stream, got = tokens(reply), []
            got += next(stream)
            # Of the engines: by the router's next poll the stream may have ended.
            (leaving,) = until(lambda: [id for id in engines if engines[id].state()["running"]])
            begun = time.monotonic()
            code, log = engines[leaving].stop()
            took = time.monotonic() - begun
            for part in stream:
                got += part
        assert code == 0 and took < 15, (took, log)
        assert len(got) == 150
        receipt = router.http.get(f"/admin/requests/{reply.headers['x-request-id']}").json()
        (retry,) = receipt["retries"]
        assert retry["error"]["message"] == "the engine is being drained" and not retry["engines"]
        until(lambda: leaving not in running_at(router))
        (other,) = running_at(router)
        assert other != leaving
    finally:
        for one in engines.values():
            one.kill()


@pytest.mark.parametrize("hurried", [False, True])
def test_the_bound_and_a_second_signal_end_the_wait(router, hurried):
    """The only engine: nothing can move."""
    alone = engine("a", router, "--drain-s", "20" if hurried else "3")
    try:
        until(lambda: router.http.get("/health").json()["engines"]["up"] == 1)
        body = {"prompt": PROMPT, "max_tokens": 1000, "stream": True, "ignore_eos": True}
        with router.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert reply.status_code == 200, next(lines)
            next(lines)
            until(lambda: alone.state()["running"])
            begun = time.monotonic()
            alone.signal(signal.SIGTERM)
            time.sleep(0.3)
            assert alone.state()["running"] == 1
            if hurried:
                alone.signal(signal.SIGTERM)
            assert alone.wait() == 0
            assert time.monotonic() - begun < 10
    finally:
        alone.kill()


def test_without_a_router_what_runs_may_end():
    alone = engine("a", None, "--drain-s", "20")
    try:
        stream = alone.stream(PROMPT, max_tokens=60)
        got = [*next(stream)["token_ids"]]
        alone.signal(signal.SIGTERM)
        for event in stream:
            got += event["token_ids"]
        assert len(got) == 60 and alone.wait() == 0
    finally:
        alone.kill()
