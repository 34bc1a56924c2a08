"""`up --config` with real processes: pools, a flag above the file, and the end of all of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from redis_server import RedisServer, needs_redis
from router_process import until

pytestmark = [pytest.mark.slow, pytest.mark.processes]

PASSWORD = "of-the-store"
FILE = """
model = "mock"
state_file = "state.json"

[router]
port = 1
strategy = "prefill_decode"
workers = 2
STORE
[engine]
pool-pages = 64
step-ms = 1

[keys]
admin_key = {env = "KEY_OF_THE_TEST"}
URL

[[pool]]
name = "first"
role = "prefill"
labels = {gpu = "a", zone = "x"}

[[pool]]
role = "decode"
[pool.engine]
pool-pages = 128
"""


@pytest.fixture(params=[False, pytest.param(True, marks=[*needs_redis, pytest.mark.thorough])])
def file(request: pytest.FixtureRequest) -> Iterator[str]:
    """Without and with a Redis."""
    if not request.param:
        yield FILE.replace("STORE", "").replace("URL", "")
        return
    redis = RedisServer(password=PASSWORD)
    try:
        text = FILE.replace("STORE", 'store-password-file = "password"\n')
        yield text.replace("URL", f'store = "{redis.url}#of-up"')
    finally:
        redis.close()


def test_up_serves_what_the_file_and_flags_say(file: str, tmp_path: Path):
    (tmp_path / "fleet.toml").write_text(file)
    (tmp_path / "password").write_text(PASSWORD)
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
        # Each worker counts the others at its own time.
        store = until(
            lambda: (told := httpx.get(f"{url}/health").json()["store"])["routers"] == 2 and told
        )
        running = psutil.Process(process.pid).children(recursive=True)
        arguments = " ".join(part for one in running for part in one.cmdline())
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert (store["status"], store["routers"]) == ("ok", 2)
    assert store["router"].startswith("worker-") != ("redis" in file)
    assert PASSWORD not in arguments and "of-up" not in arguments
    assert not url.endswith(":1")
    assert [one["id"] for one in state["engines"]] == ["first-0", "engine-0"]
    found = {one["role"]: (one["labels"], one["state"]["pages"]["total"]) for one in engines}
    first, second = found["prefill"], found["decode"]
    assert first[0] == {"gpu": "a", "zone": "x"} and second[0] == {}
    assert second[1] - first[1] == 64  # pages
    assert process.returncode == 0, errors
    pids = [state["router"]["pid"], *(engine["pid"] for engine in state["engines"])]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
