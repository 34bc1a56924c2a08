"""`up --config` with real processes: pools, a flag above the file, and the end of all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.processes]

FILE = """
model = "mock"
state_file = "state.json"

[router]
port = 1
strategy = "prefill_decode"

[engine]
pool-pages = 64
step-ms = 1

[keys]
admin_key = {env = "KEY_OF_THE_TEST"}

[[pool]]
name = "first"
role = "prefill"
labels = {gpu = "a", zone = "x"}

[[pool]]
role = "decode"
[pool.engine]
pool-pages = 128
"""


def test_up_serves_what_the_file_and_flags_say(tmp_path: Path):
    (tmp_path / "fleet.toml").write_text(FILE)
    root = Path(__file__).parents[4]
    process = subprocess.Popen(
        [sys.executable, "-m", "router", "up", "--config", "fleet.toml", "--port", "0"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root), "KEY_OF_THE_TEST": "of-the-admin"},
    )
    state_file = tmp_path / "state.json"
    try:
        deadline = time.monotonic() + 120
        while not state_file.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        assert state_file.exists(), process.communicate(timeout=10)
        state = json.loads(state_file.read_text())
        url = state["router"]["url"]
        body = {"model": "mock", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=30)
        headers = {"Authorization": "Bearer of-the-admin"}
        assert httpx.get(f"{url}/admin/engines").status_code == 401
        engines = httpx.get(f"{url}/admin/engines", headers=headers).json()["engines"]
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert not url.endswith(":1")
    assert [one["id"] for one in state["engines"]] == ["first-0", "engine-0"]
    found = {one["role"]: (one["labels"], one["state"]["pages"]["total"]) for one in engines}
    first, second = found["prefill"], found["decode"]
    assert first[0] == {"gpu": "a", "zone": "x"} and second[0] == {}
    assert second[1] - first[1] == 64  # pages
    assert process.returncode == 0, errors
    pids = [state["router"]["pid"], *(engine["pid"] for engine in state["engines"])]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
