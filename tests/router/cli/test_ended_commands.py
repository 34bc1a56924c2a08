"""Commands that a signal ends: the terminal is as before, and nothing is half done."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from router.base import bare_environment

pytestmark = pytest.mark.processes
HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"
RUN = (sys.executable, "-c", "from router.cli import main; main()")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)]
)
def test_a_simulation_that_is_ended_leaves_a_clean_terminal(number, code):
    command = ("simulate", "data_parallel", "--fleet", "2xllama-3.1-8b@a100", "--rate", "5",
               "--requests", "10000000")  # fmt: skip
    ours, theirs = pty.openpty()
    env = {**bare_environment(), "TERM": "xterm", "PYTHONPATH": str(Path.cwd())}
    process = subprocess.Popen([*RUN, *command], stdout=subprocess.PIPE, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    while HIDE not in shown or b" of 10000000 requests" not in shown:
        shown += os.read(ours, 4096)
    process.send_signal(number)
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    assert process.wait() == code
    assert process.stdout is not None and process.stdout.read() == b""
    assert b"Traceback" not in shown and shown.rindex(SHOW) > shown.rindex(HIDE)


class Router(BaseHTTPRequestHandler):
    """A router that advises `splits`, and does not answer the change of the strategy."""

    protocol_version = "HTTP/1.1"
    roles: dict[str, str]
    asked: threading.Event
    done: threading.Event

    def do_POST(self) -> None:
        rows = [
            {"title": name, "name": name, "params": {}, "roles": roles, "current": not number,
             "gain": 0.1 * number, "spread": 0.0, "failed": None, "jct_ms": None, "alike": []}
            for number, (name, roles) in enumerate(
                [("old", self.roles), ("new", {"a": "prefill", "b": "decode"})]
            )
        ]  # fmt: skip
        advice = {
            "ranking": rows, "proposal": rows[1], "keep": False, "why": "", "notes": [], "seeds": 2,
            "generation": 1, "objective": "goodput", "traffic": {"requests": 9, "seconds": 9.0},
        }  # fmt: skip
        self._reply(b"data: " + json.dumps({"advice": advice}).encode() + b"\n\n")

    def do_GET(self) -> None:
        engines = [{"id": id, "role": role} for id, role in self.roles.items()]
        self._reply(json.dumps({"engines": engines, "canary": None}).encode())

    def do_PATCH(self) -> None:
        self.roles[self.path.rpartition("/")[2]] = json.loads(self._body())["role"]
        self._reply(b"{}")

    def do_PUT(self) -> None:
        self._body()
        self.asked.set()
        self.done.wait()

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def _reply(self, body: bytes) -> None:
        if self.command == "POST":
            self._body()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def a_router() -> Iterator[tuple[type[Router], str]]:
    class Mine(Router):
        roles = {"a": "any", "b": "any"}  # noqa: RUF012
        asked, done = threading.Event(), threading.Event()

    with ThreadingHTTPServer(("127.0.0.1", 0), Mine) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield Mine, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            Mine.done.set()
            server.shutdown()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
def test_an_advice_whose_application_is_ended_gives_the_roles_back(number, code):
    with a_router() as (router, url):
        env = {**bare_environment(), "PYTHONPATH": str(Path.cwd())}
        process = subprocess.Popen(
            [*RUN, "advise", "--url", url, "--apply"], env=env,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        router.asked.wait(60)
        assert router.roles == {"a": "prefill", "b": "decode"}
        process.send_signal(number)
        output = process.communicate()[0]
        assert process.returncode == code, output
        assert b"Traceback" not in output
        assert router.roles == {"a": "any", "b": "any"}
