"""An engine with `--router` is served by that router, even if the router starts later."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from forked import ForkedProcess, Program, run_engine, run_microserve

pytestmark = pytest.mark.processes
PARENT = ("--parent-pid", str(os.getpid()))  # `up` has made the dry run


@contextmanager
def running(program: Program, *flags: str) -> Iterator[str]:
    """Run a program; yield the URL that it is ready at."""
    process = ForkedProcess(program, *flags)
    try:
        yield process.line().split()[-1]
        process.signal(signal.SIGTERM)
        assert process.wait() == 0, process.log
    finally:
        process.kill()


@pytest.mark.slow
def test_an_engine_registers_itself_with_a_router() -> None:
    with (
        running(run_microserve, "router", "--port", "0", *PARENT) as url,
        running(
            run_engine, "tiny", "--port", "0", "--router", url, "--engine-id", "mine",
            "--role", "decode", "--threads", "1", "--pool-pages", "256",
        ) as own,
    ):  # fmt: skip
        deadline = time.monotonic() + 30
        while True:
            listed = httpx.get(f"{url}/admin/engines").json()["engines"]
            if listed and listed[0]["status"] == "up":
                break
            assert time.monotonic() < deadline, listed
            time.sleep(0.02)
        assert [(e["id"], e["url"], e["role"]) for e in listed] == [("mine", own, "decode")]
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 3
