"""A router ends within its limits though its Redis is dead, when it serves and when it starts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine_process import EngineProcess
from forked import ForkedProcess, run_microserve
from redis_server import RedisServer, needs_redis
from router_process import RouterProcess, until

pytestmark = [pytest.mark.processes, pytest.mark.slow, *needs_redis]

LIMITED = {"Authorization": "Bearer limited"}


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    running = EngineProcess("--step-ms", "1", secret="ab" * 32, model="mock")
    try:
        yield running.url
    finally:
        running.kill()


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    try:
        yield server
    finally:
        server.close()


def end(redis: RedisServer, how: str) -> None:
    if how == "killed":
        redis.kill()
    else:
        redis.signal(signal.SIGSTOP)


class Load:
    """Clients whose every request asks the store for its key's limits."""

    def __init__(self, url: str, count: int = 3) -> None:
        self.answered = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(url,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, url: str) -> None:
        body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
        with httpx.Client(base_url=url, timeout=30, headers=LIMITED) as http:
            while not self._over.is_set():
                try:
                    reply = http.post("/v1/completions", json=body)
                except httpx.HTTPError:  # the router has ended
                    return
                self.answered += reply.status_code == 200


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_router_that_serves_ends_without_its_store(
    engine: str, redis: RedisServer, tmp_path: Path, how: str
):
    keys = tmp_path / "keys"
    keys.write_text("limited rpm=100000 tpm=100000000\n")
    flags = ("--store", redis.url, "--api-key-file", str(keys), "--shutdown-s", "1")
    router = RouterProcess([engine], "data_parallel", *flags)
    load = Load(router.url)
    try:
        until(lambda: load.answered > 20)
        end(redis, how)
        router.signal(signal.SIGTERM)
        assert router.wait() == 0, router.log
    finally:
        load.end()
        router.kill()


@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_router_that_starts_ends_without_its_store(
    engine: str, redis: RedisServer, how: str, workers: int
):
    """It would wait for its store longer, and then fail."""
    end(redis, how)
    flags = (
        "--engine", engine, "--port", "0", "--store", redis.url, "--workers", str(workers),
        "--parent-pid", str(os.getpid()),
    )  # fmt: skip
    router = ForkedProcess(run_microserve, "router", *flags)
    try:
        until(lambda: handles(router.pid, signal.SIGTERM))
        router.signal(signal.SIGTERM)
        assert router.wait() == 0, router.log
    finally:
        router.kill()


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    caught = next(line.split()[1] for line in lines if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)
