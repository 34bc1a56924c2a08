"""Flags, exit codes and signals of `python -m engine`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engine_process import ROOT, EngineProcess, events
from forked import ForkedProcess, run_engine
from waiting import until

from engine.flags import parse_cpus, parse_flags
from engine.main import _serve, main
from engine.protocol import EngineConfig

PROMPT = [(7 * n) % 250 for n in range(40)]
CORE = min(os.sched_getaffinity(0))


def test_defaults_are_those_of_the_config():
    assert parse_flags([]) == EngineConfig()
    assert parse_flags(["tiny", "--pool-pages", "7", "--role", "prefill"]) == EngineConfig(
        model="tiny", pool_pages=7, role="prefill"
    )


def test_what_follows_two_dashes_is_vllm_s():
    own = ["tiny", "--backend", "vllm", "--vllm-args=--enforce-eager"]
    config = parse_flags([*own, "--", "--block-size", "32", "--note", "a b"])
    assert config.vllm_args == "--enforce-eager --block-size 32 --note 'a b'"


@pytest.mark.parametrize(
    "flags",
    [
        ["tiny", "--", "--block-size", "32"],
        ["--nothing"],
        ["tiny", "tiny"],
        ["--port", "x"],
        ["--port", "-1"],
        ["--port", "65536"],
        ["--role", "both"],
        ["--dtype", "int8"],
        ["--device", "tpu"],
        ["--log-level", "loud"],
        ["--cpus", "a"],
        ["--cpus", "0-"],
        ["--cpus", "9999"],
        ["--page-size", "0"],
        ["--max-batch", "0"],
        ["--token-budget", "-5"],
        ["--decode-slowdown", "0.9"],
        ["--decode-slowdown", "nan"],
        ["--lease-ms", "0"],
        ["--pool-pages", "-1"],
        ["--threads", "-1"],
        ["--host-pages", "-1"],
        ["--disk-pages", "-1", "--disk-dir", "/"],
        ["--disk-pages", "5"],
        ["--disk-dir", "/"],
        ["--disk-keep"],
        ["--preemption", "never"],
        ["--lend-share", "-0.1"],
        ["--lend-share", "1.01"],
        ["--lend-share", "nan"],
        ["--lend-share", "half"],
        ["smollm2", "--lend-share", "0.5", "--tp", "2"],
        ["smollm2", "--lend-share", "0.5", "--pp", "2"],
        ["smollm2", "--lend-share", "0.5", "--device-pages", "8"],
        ["--lend-compute", "0"],
        ["--lend-compute", "1.01"],
        ["smollm2", "--borrow", "--tp", "2"],
        ["smollm2", "--borrow", "--pp", "2"],
        ["smollm2", "--borrow", "--device-pages", "8"],
        ["smollm2", "--borrow", "--backend", "vllm"],
        ["smollm2", "--borrow", "--dtype", "float16"],
        ["mock", "--borrow"],
    ],
)
def test_bad_flags_exit_with_2_and_say_why(flags: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse_flags(flags)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_cpus():
    assert parse_cpus("") == set()
    assert parse_cpus(f"{CORE}") == parse_cpus(f"{CORE}-{CORE}") == {CORE}


@pytest.mark.parametrize(
    ("flags", "code", "why"),
    [
        (["--host", "0.0.0.0"], 2, "--api-key"),
        (["no/such/model.gguf"], 2, "no/such/model.gguf"),
        (["tiny", "--page-size", "48", "--port", "0"], 2, "page size"),
        (["tiny", "--host", "999.9.9.9"], 2, "--api-key"),
        (["tiny", "--port", "0", "--lend-share", "1", "--dtype", "float16"], 2, "float32 and"),
        (["tiny", "--port", "0", "--host-pages", str(1 << 40)], 2, "--host-pages"),
        (["tiny", "--port", "0", "--disk-pages", str(1 << 40), "--disk-dir", "."], 2, "no room"),
        (["tiny", "--port", "0", "--disk-pages", "1", "--disk-dir", "no/such"], 2, "no/such"),
    ],
)
def test_a_failed_start_says_why(
    flags: list[str], code: int, why: str, capsys: pytest.CaptureFixture[str]
):
    assert main(flags) == code
    error = capsys.readouterr().err
    assert why in error and "Traceback" not in error


def test_a_missing_secret_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv("MICROSERVE_SECRET", raising=False)
    for model, wanted in (("tiny", 1), ("mock", 0)):
        caplog.clear()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            main([model, "--port", str(taken.getsockname()[1])])
        assert caplog.text.count("MICROSERVE_SECRET") == wanted


def test_a_port_in_use_is_reported(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["tiny", "--port", str(taken.getsockname()[1])]) == 1
    assert "in use" in capsys.readouterr().err


@pytest.mark.processes
def test_an_engine_listens_on_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6")
    engine = EngineProcess("--host", "::1", model="mock")
    try:
        assert engine.url.startswith("http://[::1]:")
        assert engine.http.get("/health").status_code == 200
    finally:
        engine.kill()


@pytest.mark.processes
def test_an_engine_whose_parent_has_ended_ends_too():
    """This runs in a child process, because the flag kills its process."""
    engine = ForkedProcess(run_engine, "tiny", "--parent-pid", str(2**22 + 1))
    try:
        assert engine.wait(60) == 1
    finally:
        engine.kill()


@pytest.fixture
def guarded() -> Iterator[EngineProcess]:
    """An engine with its own API key and secret."""
    process = EngineProcess("--api-key", "key", "--pool-pages", "200", secret="other")
    yield process
    process.kill()


@pytest.mark.processes
@pytest.mark.slow
def test_keys_secrets_and_a_clean_exit(guarded: EngineProcess, engine_process: EngineProcess):
    """One test checks all of it, because starting a process takes a second."""
    for headers in ({}, {"authorization": "Bearer"}, {"authorization": "Bearer other"}):
        reply = guarded.http.get("/microserving/state", headers=headers)
        assert reply.status_code == 401
        assert reply.json()["error"]["type"] == "unauthorized"
    assert guarded.http.get("/health").status_code == 200
    guarded.http.headers["authorization"] = "Bearer key"

    got = engine_process.post("prep_recv", request_id="m", prompt=PROMPT, end=39).json()
    body = {"request_id": "m", "prompt": PROMPT, "begin": got["match_len"], "end": 39}
    refused = guarded.post("remote_send", **body, kv_addr=got["kv_addr"])
    assert refused.json()["error"]["type"] == "bad_address"
    engine_process.post("release", lease_id=got["lease_id"])

    body = {"request_id": "s", "prompt": PROMPT, "ignore_eos": True, "max_tokens": 3000}
    with guarded.http.stream("POST", "/microserving/start_generate", json=body) as stream:
        got_events = events(stream)
        next(got_events)
        code, log = guarded.stop(signal.SIGTERM)
        with contextlib.suppress(Exception):
            list(got_events)
    assert code == 0
    assert "Traceback" not in log


@pytest.mark.processes
@pytest.mark.slow
def test_kv_is_sent_between_two_engine_processes(engine_process: EngineProcess):
    """The sender is killed, the receiver continues, and a new sender has a new epoch."""
    prompt = [(n * n + 3 * n) % 250 for n in range(90)]
    sender = EngineProcess("--pool-pages", "200")
    try:
        expected = sender.generate(prompt, max_tokens=12)
        got = engine_process.post("prep_recv", request_id="t", prompt=prompt, end=89).json()
        body = {"request_id": "t", "prompt": prompt, "begin": 0, "end": 89}
        reply = sender.post("remote_send", **body, kv_addr=got["kv_addr"]).json()
        assert (reply["sent_tokens"], reply["cached_tokens"]) == (89, 80)
        sender.kill()
        events = engine_process.generate(
            prompt, max_tokens=12, begin=89, lease_id=got["lease_id"], request_id="t"
        )
        assert [e["token_ids"] for e in events] == [e["token_ids"] for e in expected]
        assert events[0]["begin"] == 89
        engine_process.at_rest()
    finally:
        sender.kill()


@pytest.mark.processes
@pytest.mark.slow
def test_an_engine_dies_with_its_parent():
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'engine', 'tiny', '--port', '0',"
        " '--pool-pages', '64', '--parent-pid', str(os.getpid())],"
        " stdout=subprocess.PIPE, text=True)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    give_up = time.monotonic() + 30
    while _runs(pid):
        assert time.monotonic() < give_up
        time.sleep(0.005)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@pytest.mark.slow
async def test_a_head_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch, capsys):
    """The engine runs in this process, because the time limit has no flag."""
    monkeypatch.setattr("engine.api.gate.BODY_TIMEOUT_S", 0.2)
    config = parse_flags(["mock", "--port", "0"])
    running = asyncio.ensure_future(_serve(config, b"secret"))
    said = ""

    def ready() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return running.done() or said.endswith("\n")

    try:
        await until(ready, timeout=60)
        url = httpx.URL(said.split()[-1])
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()
    finally:
        if said:  # its handler is installed
            os.kill(os.getpid(), signal.SIGTERM)
        await running
