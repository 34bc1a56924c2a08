"""What `up` gives its children: keys, where they import from, where their output goes, time."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from test_router_up import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.processes]

STRATEGY = '''
import logging
import os
import socket

from helper import engine_for
from router import strategy

log = logging.getLogger("mine")
print("printed at import")

@strategy
async def chatty(request, cluster):
    """Prints and logs."""
    print("printed for a request")
    log.info("logged for a request")
    if len(request.prompt) == 77:
        stop_listening()
    async for chunk in engine_for(cluster).start_generate(request):
        yield chunk

def stop_listening():
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            found = socket.socket(fileno=os.dup(number))
            if found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
'''
HELPER = "def engine_for(cluster):\n    return cluster.engines.least_loaded()\n"
SHADOWS = ("engine", "router", "kvcache", "strategies", "uvicorn")


class Up:
    """`up mock`, started in a folder of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.state_file, self._log = folder / "state.json", folder / "up.log"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "router", "up", "mock", "--port", "0"),
                *("--engines", "1", "--step-ms", "1", "--state-file", str(self.state_file), *flags),
            ],
            cwd=folder, stdout=subprocess.DEVNULL, stderr=self._log.open("wb"),
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
        )  # fmt: skip

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def state(self) -> dict:
        return json.loads(self.state_file.read_text())

    def wait(self) -> None:
        wait_for(lambda: self.state_file.exists() or self.process.poll() is not None, 120)
        assert self.state_file.exists(), self.log


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose files have the names of packages, and a strategy in two files."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py was imported')\n")
    (tmp_path / "chatty.py").write_text(STRATEGY)
    (tmp_path / "helper.py").write_text(HELPER)
    return tmp_path


@pytest.fixture
def up(folder: Path) -> Iterator[Up]:
    up = Up(folder, "--strategy", "chatty.py", "--health-deadline-s", "2")
    try:
        up.wait()
        yield up
    finally:
        up.process.terminate()
        up.process.wait(30)


def test_children_of_up(up: Up) -> None:
    """One test checks all of it, because starting the processes takes seconds."""
    state, url = up.state, up.state["router"]["url"]
    (engine,) = state["engines"]
    body = {"prompt": [1, 2, 3], "max_tokens": 3}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
    # Files in the current folder shadow no package, and the strategy imports from there.
    assert "was imported" not in up.log
    for line in ("printed at import", "printed for a request", "INFO mine"):
        wait_for(lambda line=line: any(
            said.startswith("router | ") and line in said for said in up.log.splitlines()
        ))  # fmt: skip
    # The engine asks for a key, which no command line shows.
    calls = httpx.Client(base_url=engine["url"], verify=False)
    assert calls.get("/microserving/state").status_code == 401
    key = state["engine_api_key"]
    headers = {"Authorization": f"Bearer {key}"}
    assert calls.get("/microserving/state", headers=headers).status_code == 200
    assert stat.S_IMODE(up.state_file.stat().st_mode) == 0o600
    for pid in (up.process.pid, state["router"]["pid"], engine["pid"]):
        assert key not in Path(f"/proc/{pid}/cmdline").read_text()
    # A router is not silent while `up` does not run.
    os.kill(up.process.pid, signal.SIGSTOP)
    time.sleep(3)
    os.kill(up.process.pid, signal.SIGCONT)
    wait_for(lambda: re.search(r"up did not run for ([2-9]|\d\d)", up.log))
    time.sleep(2.5)  # more than the deadline
    assert up.state == state
    assert "is killed" not in up.log
    # One that lives but does not listen is.
    with suppress(httpx.HTTPError):
        httpx.post(f"{url}/v1/completions", json={**body, "prompt": [1] * 77}, timeout=30)
    wait_for(lambda: "router has not answered for 2 s and is killed" in up.log)
    wait_for(lambda: "router ready" in up.log)
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
