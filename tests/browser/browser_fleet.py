"""Mock engines and a router in front of them, for a browser to look at."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

import httpx
from engine_process import EngineProcess
from forked import ForkedProcess, run_microserve

__all__ = ["BrowserFleet", "Streamed", "behind_prefix", "until"]

T = TypeVar("T")
FAST = ("--step-ms", "2", "--prefill-tokens-per-ms", "50")


class BrowserFleet:
    """Engines with the model `mock`, one of each of `roles`, and a router at `url`."""

    def __init__(
        self,
        *flags: str,
        roles: tuple[str, ...] = ("any", "any"),
        engine_flags: tuple[str, ...] = FAST,
        admin_key: str = "",
        strategy: str | Path = "data_parallel",
    ) -> None:
        """`flags` are the router's."""
        self._flags = [*flags, "--strategy", str(strategy), "--allow-upload"]
        if admin_key:
            self._flags += ["--admin-key", admin_key]
        self.engines = [
            EngineProcess("--role", role, *engine_flags, model="mock") for role in roles
        ]
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        self.http = httpx.Client(base_url=self.url, timeout=60, verify=False, headers=self.headers)
        self.start()

    def start(self) -> None:
        """Start the router, also again after `stop`, at the same address."""
        urls = [part for engine in self.engines for part in ("--engine", engine.url)]
        self.router = ForkedProcess(
            run_microserve,
            *("router", "--parent-pid", str(os.getpid()), "--port", str(self.port)),
            *urls,
            *self._flags,
        )
        self.router.line()

    def stop(self) -> None:
        """Kill the router."""
        self.router.kill()

    def close(self) -> None:
        """Kill all processes."""
        self.http.close()
        for process in (self.router, *self.engines):
            process.kill()

    def get(self, path: str) -> Any:
        """Return what the API answers."""
        reply = self.http.get(path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    def send(self, method: str, path: str, **body: Any) -> Any:
        reply = self.http.request(method, path, json=body)
        assert reply.status_code < 300, reply.text
        return reply.json()

    def snapshot(self) -> Any:
        """Return the next snapshot of `/admin/live`."""
        with self.http.stream("GET", "/admin/live") as reply:
            line = next(line for line in reply.iter_lines() if line.startswith("data: "))
        return json.loads(line.removeprefix("data: "))

    def ask(self, prompt: list[int] | str, max_tokens: int = 8, *, id: str = "") -> str:
        """Have a request served; return its id."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        headers = {"X-Request-Id": id} if id else {}
        reply = self.http.post("/v1/completions", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.headers["x-request-id"]


def until(condition: Callable[[], T], timeout: float = 30.0) -> T:
    """Poll until `condition` holds; return what it returned."""
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


class Streamed(threading.Thread):
    """A streamed completion of `tokens` tokens in a thread; `receipt` waits for its end."""

    def __init__(self, fleet: BrowserFleet, id: str, tokens: int) -> None:
        super().__init__()
        self._fleet, self.id, self._tokens = fleet, id, tokens
        self.lines: list[str] = []  # of the answer, once it has ended
        self.start()

    def run(self) -> None:
        body = {"prompt": [11] * 60, "max_tokens": self._tokens, "ignore_eos": True,
                "stream": True}  # fmt: skip
        headers = {"X-Request-Id": self.id}
        post = self._fleet.http.stream("POST", "/v1/completions", json=body, headers=headers)
        with suppress(httpx.HTTPError), post as got:  # the test looks at what has come
            self.lines = [line for line in got.iter_lines() if line]

    def decoding(self, tokens: int) -> str:
        """Wait until it has so many tokens; return the engine that makes them."""

        def found() -> str | None:
            reply = self._fleet.http.get(f"/admin/requests/{self.id}")
            legs = reply.json()["legs"] if reply.status_code == 200 else []
            return next((leg["engine"] for leg in legs if leg["tokens"] >= tokens), None)

        engine = until(found)
        assert engine is not None
        return engine

    def told(self) -> dict[str, Any]:
        """Return its receipt as it is now."""
        receipt: dict[str, Any] = self._fleet.get(f"/admin/requests/{self.id}")
        return receipt

    def receipt(self) -> dict[str, Any]:
        """Return its receipt once it has ended well, with all tokens."""
        self.join()
        assert self.lines[-1:] == ["data: [DONE]"]
        receipt = self.told()
        assert (receipt["status"], receipt["completion_tokens"]) == ("done", self._tokens)
        return receipt


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Prefixed(BaseHTTPRequestHandler):
    """Passes requests below `prefix` on to `port`, without it, and replies as they come."""

    prefix = ""
    port = 0

    def do_GET(self) -> None:
        if not self.path.startswith(f"{self.prefix}/"):
            self.send_error(404)
            return
        upstream = HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name != "Connection"}
        upstream.request("GET", self.path.removeprefix(self.prefix), headers=headers)
        reply = upstream.getresponse()
        self.send_response(reply.status)
        for name, value in reply.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "date"):
                self.send_header(name, value)
        self.end_headers()  # HTTP/1.0: the body ends with the connection
        with suppress(OSError, HTTPException):
            while data := reply.read1():
                self.wfile.write(data)
                self.wfile.flush()
        upstream.close()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def behind_prefix(fleet: BrowserFleet, prefix: str) -> Iterator[str]:
    """The URL of a proxy that serves the router's root below `prefix`."""
    handler = type("Prefixed", (_Prefixed,), {"prefix": prefix, "port": fleet.port})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as proxy:
        proxy.block_on_close = False  # streams end when their pages are closed
        serving = threading.Thread(target=proxy.serve_forever)
        serving.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}{prefix}/"
        finally:
            proxy.shutdown()
            serving.join()
