"""An engine with `--router` is served by that router, even if the router starts later."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

pytestmark = pytest.mark.processes


@contextmanager
def running(*args: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", *args], stdout=subprocess.PIPE, text=True, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@pytest.mark.slow
def test_an_engine_registers_itself_with_a_router() -> None:
    with running("router", "router", "--port", "0") as router:
        url = first_line(router).split()[-1]
        with running(
            "engine", "tiny", "--port", "0", "--router", url, "--engine-id", "mine",
            "--role", "decode", "--threads", "1", "--pool-pages", "256",
        ) as engine:  # fmt: skip
            own = first_line(engine).split()[-1]
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
