"""Real engines with `--backend vllm`, in vLLM's own environment, and the calls that tests make."""

from __future__ import annotations

import os
import queue
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_process import ROOT, EngineClient

PYTHON = ROOT / ".peers" / "vllm" / "bin" / "python"
BLOCK = 32  # tokens; the least on CPUs
EAGER = ("--", "--enforce-eager", "--block-size", str(BLOCK))
START_S = 120

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-vllm installs vLLM"),
]


# vLLM compiles models, and its log probabilities, with torch's compiler.
compiles = pytest.mark.skipif(
    " " in str(PYTHON), reason="torch's compiler cannot link from a path with a space"
)


class VllmProcess(EngineClient):
    """An engine whose blocks vLLM computes."""

    max_tokens = 6

    def __init__(
        self,
        *flags: str,
        model: str = "tiny",
        cpu: str = "0",
        secret: str = "secret",
        vllm: tuple[str, ...] = EAGER,
        pages: int = 200,
        port: int = 0,
    ) -> None:
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._log: list[str] = []
        self.process = subprocess.Popen(
            [
                *(str(PYTHON), "-P", "-m", "engine", model, "--backend", "vllm"),
                *("--port", str(port), "--threads", "1", "--cpus", cpu, "--dtype", "float32"),
                *("--pool-pages", str(pages), *flags, *vllm),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "MICROSERVE_SECRET": secret},
            start_new_session=True,
        )
        for stream in (self.process.stdout, self.process.stderr):
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()
        self.url = ""

    def _read(self, stream: Any) -> None:
        for line in stream:
            self._log.append(line)
            if " ready http" in line:
                self._lines.put(line)
        self._lines.put("")

    def ready(self) -> VllmProcess:
        """Wait until it serves."""
        line = self._lines.get(timeout=START_S)
        if not line:
            raise AssertionError(self.log)
        self.url = line.split()[-1]
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=False)
        return self

    @property
    def log(self) -> str:
        return "".join(self._log)

    @property
    def core(self) -> int:
        """The process id of vLLM's engine core."""
        for child in children(self.process.pid):
            line = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            name = Path(f"/proc/{child}/comm").read_text().strip()
            if "spawn_main" in line or name.startswith("VLLM"):
                return child
        raise AssertionError(f"no engine core among {children(self.process.pid)}")

    def tokens(self, prompt: list[int], **fields: Any) -> list[int]:
        return tokens(self.generate(prompt, **fields))

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=30)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def tokens(found: list[dict[str, Any]]) -> list[int]:
    """Return the tokens of events. Fails for an error."""
    assert not any("error" in event for event in found), found
    return [token for event in found for token in event.get("token_ids", [])]


def unique() -> str:
    return f"r{time.monotonic_ns()}"


def prompt(length: int, seed: int) -> list[int]:
    """Return tokens that no other seed has: no engine has them cached."""
    random_ = random.Random(seed)
    return [random_.randrange(250) for _ in range(length)]


def send(
    sender: VllmProcess, receiver: VllmProcess, ids: list[int], end: int, begin: int | None = None
) -> tuple[str, str, dict[str, Any]]:
    """Put `ids[:end]` into a lease; return request id, lease id and the send's reply."""
    request_id = unique()
    lease = receiver.post("prep_recv", request_id=request_id, prompt=ids, end=end).json()
    assert "lease_id" in lease, lease
    if lease["match_len"] >= end:
        return request_id, lease["lease_id"], {}
    sent = sender.post(
        "remote_send",
        request_id=request_id,
        prompt=ids,
        begin=lease["match_len"] if begin is None else begin,
        end=end,
        kv_addr=lease["kv_addr"],
    )
    assert sent.status_code == 200, sent.text
    return request_id, lease["lease_id"], sent.json()


@contextmanager
def running(*engines: VllmProcess) -> Iterator[list[VllmProcess]]:
    """Wait for engines that start together, and kill them afterwards."""
    try:
        yield [engine.ready() for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
