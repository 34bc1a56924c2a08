"""`microserve up` and its processes: start, restart and end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from forked import ForkedProcess, run_microserve

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@contextmanager
def up(
    folder: Path, *flags: str, own_group: bool = False
) -> Iterator[tuple[subprocess.Popen, dict]]:
    state = folder / "state.json"
    command = [sys.executable, "-m", "router", "up", "tiny", "--port", "0", "--pool-pages", "256"]
    process = subprocess.Popen(
        [*command, "--state-file", str(state), *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=own_group,
    )  # fmt: skip
    try:
        wait_for(lambda: state.exists() or process.poll() is not None)
        assert state.exists(), process.communicate()
        yield process, json.loads(state.read_text())
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=30)


def wait_for(condition, timeout: float = 120.0) -> None:
    """Poll until `condition` holds: other processes send no event."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def pids(state: dict) -> list[int]:
    return [state["router"]["pid"], *(engine["pid"] for engine in state["engines"])]


def failed(*flags: str) -> tuple[int, str]:
    """Run `microserve`, which must end; return its exit code and what it says."""
    process = ForkedProcess(run_microserve, *flags)
    try:
        return process.wait(60), process.log
    finally:
        process.kill()


def ask(state: dict) -> int:
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    return httpx.post(state["router"]["url"] + "/v1/completions", json=body, timeout=30).status_code


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_a_signal_ends_all_processes_even_crashed_and_stopped_ones(tmp_path, number):
    flags = ("--prefill", "1", "--decode", "1", "--no-respawn")
    with up(tmp_path, *flags) as (process, state):
        assert [e["role"] for e in state["engines"]] == ["prefill", "decode"]
        assert ask(state) == 200
        os.kill(state["engines"][0]["pid"], signal.SIGKILL)
        os.kill(state["engines"][1]["pid"], signal.SIGSTOP)
        process.send_signal(number)
        out, _ = process.communicate(timeout=30)
        assert process.returncode == 0
    assert all(gone(pid) for pid in pids(state))
    assert not (tmp_path / "state.json").exists()
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "engine-0",
        "engine-1",
        "router",
        "ready",
        "curl",
    ]
    assert lines[3] == f"ready {state['router']['url']}"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Iterator[tuple[subprocess.Popen, Path]]:
    """Two engines with small pools, and the state file; the last test kills `up`."""
    folder = tmp_path_factory.mktemp("small")
    with up(folder, "--pool-pages", "24", "--max-model-len", "4000") as (process, _):
        yield process, folder / "state.json"


def test_a_small_pool_bounds_the_context_and_engines_divide_the_memory(small):
    state = json.loads(small[1].read_text())
    for engine in state["engines"]:
        arguments = psutil.Process(engine["pid"]).cmdline()
        assert arguments[arguments.index("--memory-share") + 1] == "0.500000"
    with httpx.Client(base_url=state["router"]["url"], timeout=30) as http:
        (card,) = http.get("/v1/models").json()["data"]
        assert card["max_model_len"] == 24 * 16
        body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
        chat = http.post("/v1/chat/completions", json=body)
        assert chat.status_code == 200, chat.text
        assert chat.json()["choices"][0]["finish_reason"] == "length"
        assert chat.json()["usage"]["total_tokens"] == 24 * 16
        for more in ({"prompt": [1] * 385}, {"prompt": [1] * 380, "max_tokens": 5}):
            refused = http.post("/v1/completions", json=more)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"


def test_a_dead_engine_and_a_dead_router_are_restarted(small):
    state = json.loads(small[1].read_text())
    os.kill(state["engines"][0]["pid"], signal.SIGKILL)
    os.kill(state["router"]["pid"], signal.SIGKILL)

    def back() -> bool:
        now = json.loads(small[1].read_text())
        return not set(pids(now)) & {state["engines"][0]["pid"], state["router"]["pid"]}

    wait_for(back)
    now = json.loads(small[1].read_text())
    assert [e["url"] for e in now["engines"]] == [e["url"] for e in state["engines"]]
    assert now["router"]["url"] == state["router"]["url"]
    wait_for(lambda: ask(now) == 200)


def test_killing_up_ends_its_children(small):
    """Those that it has restarted too."""
    process, state_file = small
    state = json.loads(state_file.read_text())
    assert not any(gone(pid) for pid in pids(state))
    process.kill()
    wait_for(lambda: all(gone(pid) for pid in pids(state)))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["no/such/model"], "no/such/model"),
        (["tiny", "--dtype", "float32", "--cpus", "999"], "failed to start"),
        (["tiny", "--strategy", "nothing"], "no strategy 'nothing'"),
        (["tiny", "--param", "nothing"], "K=V"),
        (["tiny", "--decode-flags", "--tp 2"], "--decode-flags needs engines of that role"),
        (["tiny", "--prefill", "1", "--prefill-flags", "--port=1"], "up sets --port itself"),
        (["tiny", "--prefill", "1", "--prefill-flags", "--hos 1"], "up sets --hos itself"),
        (["tiny", "--prefill", "1", "--prefill-flags", "--tp '2"], "No closing quotation"),
    ],
)
def test_a_failed_start_says_why(flags, says):
    status, said = failed("up", "--port", "0", *flags)
    assert status != 0
    assert says in said
    assert "Traceback" not in said.replace("engine-0 | Traceback", "")


def test_a_port_in_use_is_an_error_of_one_line():
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = str(used.getsockname()[1])
        status, said = failed("router", "--port", port)
        assert status == 2
        assert "Address already in use" in said.splitlines()[-1]
        assert "Traceback" not in said


@pytest.mark.thorough  # CI runs `make demo` too
def test_the_demo_ends_with_demo_ok():
    demo = Path(__file__).parents[3] / "examples" / "demo.py"
    command = [sys.executable, str(demo), "tiny"]
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = {**os.environ, "MICROSERVE_UP_POOL_PAGES": "512"}
    done = subprocess.run(command, **both, text=True, timeout=120, check=False, env=environment)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == "demo ok"


def streamed(state: dict, number: int = 0, at: int = 0, *, count: int = 600) -> list[int]:
    """Stream `count` greedy tokens; signal the engine with `number` when `at` have arrived."""
    body = {
        "prompt": [(7 * n * n + 3 * n) % 500 + 1 for n in range(200)], "max_tokens": count,
        "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    url = state["router"]["url"] + "/v1/completions"
    headers = {"X-Request-Id": "streamed"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=90) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    tokens += choice["token_ids"] or []
            if number and len(tokens) >= at:
                os.kill(state["engines"][0]["pid"], number)
                number = 0
    assert not number, "it ended before anything happened"
    return tokens


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.thorough), signal.SIGTERM]
)
def test_a_restarted_single_engine_continues_its_generation_and_a_shutdown_ends_it(
    tmp_path, number
):
    """A stream that outlives the shutdown ends with an error.

    Ctrl-C sends SIGINT to the process group; `kill` sends SIGTERM to `up` alone.
    """
    disk = ("--disk-pages", "128", "--disk-dir", str(tmp_path), "--disk-keep")
    flags = ("--engines", "1", "--threads", "1", "--engine-wait", "80", "--stream-interval-ms", "0")
    with up(tmp_path, *flags, *disk, "--shutdown", "0.2", own_group=True) as (process, state):
        went_on = streamed(state, signal.SIGKILL, at=100)
        assert len(went_on) == 600
        assert streamed(state) == went_on
        body = {"prompt": [1, 2, 3], "max_tokens": 3000, "ignore_eos": True, "stream": True}
        url = state["router"]["url"] + "/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=30) as reply:
            lines = (line for line in reply.iter_lines() if line)
            read = [next(lines)]
            if number == signal.SIGINT:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)
            read += lines
        assert json.loads(read[-1].removeprefix("data: "))["error"]["code"] == "draining"
        assert len(read) < body["max_tokens"]
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0 and "stopping" in errors


def test_engines_of_a_role_have_flags_of_their_own(tmp_path):
    """Two stages prefill, and a worker that swaps its pages decodes."""
    split = ("--prefill-flags", "--pp 2", "--decode-flags", "--device-pages 256", "--strategy")
    with up(tmp_path, "--prefill", "1", "--decode", "1", *split, "prefill_decode") as (_, state):
        tokens = streamed(state, count=100)
        url = state["router"]["url"]
        engines = httpx.get(f"{url}/admin/engines").json()["engines"]
        receipt = httpx.get(f"{url}/admin/requests/streamed").json()
    stages = {one["role"]: [w["stage"] for w in one["state"]["workers"]] for one in engines}
    assert stages == {"prefill": [0, 1], "decode": [0]}
    calls = [leg["call"] for leg in receipt["legs"]]
    assert calls == ["prep_recv", "remote_send", "start_generate"]
    assert len(tokens) == 100
