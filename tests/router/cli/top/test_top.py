"""`microserve top`: frames of a real deployment, and a real terminal that is left clean."""

from __future__ import annotations

import fcntl
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_process import EngineProcess
from router_process import RouterProcess, until

from router.base import table_console
from router.cli.on_router.top.answers import Engines, Strategies
from router.cli.on_router.top.router_state import Away, Events, Frame, History, ask
from router.cli.on_router.top.samples import quantile, read_metrics
from router.cli.on_router.top.view import show

ROOT = Path(__file__).parents[4]
STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
PAGES = {"total": 100, "free": 40, "cached": 30, "active": 20, "leased": 9, "quarantined": 1}


def frame(at: float, engines: list[dict[str, Any]], text: str = "", **told: Any) -> Frame:
    active = {"generation": 1, "name": "mine", "params": {}, "in_flight": 0}
    strategies = Strategies.model_validate({"active": active, "generations": [active], **told})
    records = Engines.model_validate({"engines": engines}).engines
    return Frame(at, records, strategies, [], read_metrics(text))


def engine(id: str = "a", tokens: int = 0, **changed: Any) -> dict[str, Any]:
    state = {"epoch": 1, "running": 1, "waiting": 2, "puts_in_flight": 3, "pages": PAGES}
    load = {"tokens": 7, "streams": 1}
    return {
        "id": id, "role": "any", "status": "up", "draining": False, "breaker": "closed",
        "load": load, "state": {**state, "generation_tokens": tokens}, **changed,
    }  # fmt: skip


def shown(history: History, events: Events | None = None, width: int = 200, **more: Any) -> str:
    console = table_console()
    console.width = width
    with console.capture() as said:
        console.print(show(console, "http://x", history, events or Events(), **more), crop=False)
    return said.get()


def histogram(*counts: int) -> str:
    bounds = ("0.1", "0.2", "+Inf")
    name = "microserve_router_time_to_first_token_seconds"
    lines = [f'{name}_bucket{{le="{b}"}} {n}' for b, n in zip(bounds, counts, strict=True)]
    return "\n".join([f"# TYPE {name} histogram", *lines, f"{name}_count {counts[-1]}",
                      f"{name}_sum 1", ""])  # fmt: skip


def test_quantiles_are_those_of_prometheus():
    now = read_metrics(histogram(50, 100, 100)).buckets("time_to_first_token_seconds")
    assert quantile(0.5, now, {}) == pytest.approx(0.1)
    assert quantile(0.75, now, {}) == pytest.approx(0.15)
    before = {0.1: 50.0, 0.2: 50.0, float("inf"): 50.0}
    assert quantile(0.5, now, before) == pytest.approx(0.15)
    assert quantile(0.5, now, now) is None and quantile(0.5, {}, {}) is None
    beyond = {0.1: 0.0, 0.2: 0.0, float("inf"): 4.0}
    assert quantile(0.99, beyond, {}) == 0.2


def test_rates_are_those_between_two_frames_and_start_anew_with_the_router():
    def text(ended: int, http: int) -> str:
        return (
            "# TYPE microserve_router_requests counter\n"
            f'microserve_router_requests_total{{status="done"}} {ended}\n'
            "# TYPE microserve_router_http_requests counter\n"
            f"microserve_router_http_requests_total {http}\n"
        )

    history = History()
    history.add(frame(0.0, [engine(tokens=10)], text(5, 100)))
    assert history.rate("requests_total") is None and history.all_tokens_per_s() is None
    history.add(frame(2.0, [engine(tokens=30)], text(9, 120)))
    assert history.rate("requests_total", status="done") == 2.0
    assert history.all_tokens_per_s() == 10.0
    restarted = engine(tokens=1)
    restarted["state"]["epoch"] = 2
    history.add(frame(4.0, [restarted], text(0, 1)))
    assert history.rate("requests_total") is None and history.all_tokens_per_s() is None


def test_a_bar_shows_every_owner_of_pages():
    history = History()
    history.add(frame(0.0, [engine()]))
    assert "████▓▓!░░░░░········  60 %" in shown(history)


def test_what_does_not_fit_is_left_out_and_counted():
    history = History()
    history.add(frame(0.0, [engine(f"engine-{n}") for n in range(50)]))
    narrow = shown(history, width=72, height=30)
    assert all(len(line.rstrip()) <= 72 for line in narrow.splitlines())
    assert "engine-0 " in narrow and "breaker" not in narrow and "tokens/s" in narrow
    left_out = int(re.findall(r"and (\d+) more engines", narrow)[0])
    assert narrow.count("engine-") == 50 - left_out > 5
    assert len(narrow.splitlines()) <= 30


def test_engines_have_names_in_narrow_terminals():
    history = History()
    history.add(frame(0.0, [engine(f"engine-{n}") for n in range(3)]))
    for width in (24, 40, 50, 60, 72):
        narrow = shown(history, width=width)
        assert all(len(line.rstrip()) <= width for line in narrow.splitlines())
        assert all(f"engine-{n} " in narrow for n in range(3)), narrow
        assert "status" in narrow and " up " in narrow
        assert ("active" in narrow) == ("pages" in narrow)


def test_names_cannot_speak_to_the_terminal():
    evil = "\x1b[2J\x1b]0;own\x07[red]name[/red]\n"
    history, events = History(), Events()
    canary = {"generation": 1, "decision": "rolled_back", "why": evil}
    history.add(frame(0.0, [engine(evil, status=evil, role=evil)], last_canary=canary))
    events.latest.append((evil, {"at": 1e9, "reason": evil}))
    said = shown(history, events, away=evil)
    assert "\x1b" not in said and "\x07" not in said
    assert "[red]name[/red]" in said


@pytest.mark.parametrize(
    "answer",
    [b"[]", b"{}", b"not json", b'{"engines": 1, "entries": 2}', b"\xff", b"[" * 100_000],
)
def test_nonsense_of_a_router_is_no_answer(answer: bytes):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=answer))
    with httpx.Client(base_url="http://x", transport=transport) as client, pytest.raises(Away):
        ask(client)


@pytest.mark.parametrize(
    "engines",
    [
        [1],
        [{"id": "a"}],
        [engine() | {"load": None}],
        [engine() | {"state": {"pages": {"total": math.nan, "free": 1}}}],
    ],
)
def test_what_cannot_be_shown_is_no_answer(engines: list[Any]):
    """One answer of another version's router must not end a `top` that watches."""
    told = {
        "engines": engines,
        "entries": [],
        "active": {"name": "n", "params": {}, "generation": 1, "in_flight": 0},
        "canary": None,
    }

    metrics = ""

    def answer(request: httpx.Request) -> httpx.Response:
        text = metrics if request.url.path == "/metrics" else json.dumps(told)
        return httpx.Response(200, text=text)

    transport = httpx.MockTransport(answer)
    with httpx.Client(base_url="http://x", transport=transport) as client:
        with pytest.raises(Away, match=r"not an answer of a router: .*/admin/engines: engines"):
            ask(client)
        told["engines"] = [engine()]
        assert ask(client).engines[0].id == "a"
        metrics = "microserve_router_time_to_first_token_seconds_bucket 1\n"
        with pytest.raises(Away, match="not an answer of a router"):
            ask(client)


# A real deployment


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    started = [
        EngineProcess("--step-ms", "20", "--engine-id", id, secret="ab" * 32, model="mock")
        for id in ("left", "right")
    ]
    try:
        yield [one.url for one in started]
    finally:
        for one in started:
            one.kill()


def command(url: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", "router", "top", "--url", url, *flags]


@pytest.mark.processes
@pytest.mark.slow
def test_one_frame_has_everything(engines: list[str]):
    router = RouterProcess(engines, "data_parallel", "--admin-key", "k")
    try:
        router.http.headers["Authorization"] = "Bearer k"
        until(lambda: router.http.get("/health").json()["engines"]["up"] == 2)
        for _ in range(3):
            router.tokens([1, 2, 3])
        done = subprocess.run(
            command(router.url, "--once", "--interval", "0.2", "--admin-key", "k"),
            cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
            env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        said = done.stdout
        assert re.search(r"left +any +up .* 0 +closed +0\.0 +·{20}   0 %", said), said
        assert "right" in said and "0 live, 0 queued, 0.0/s" in said
        assert "strategy  data_parallel" in said and "(generation 1, 0 in flight)" in said
        assert re.search(r"TTFT p50 \d+ ms p99 \d+ ms, TPOT p50 \d+ ms p99 \d+ ms", said)
        assert re.search(r"\d\d:\d\d:\d\d  started ", said)
        assert "\x1b" not in said and done.stderr == ""
        refused = subprocess.run(
            command(router.url, "--once"), cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert refused.returncode == 1 and "needs its key" in refused.stderr
    finally:
        router.kill()


class Terminal:
    """`top` in a terminal of its own."""

    def __init__(self, url: str) -> None:
        self._own, theirs = pty.openpty()
        self.modes = termios.tcgetattr(theirs)
        self.process = subprocess.Popen(
            command(url, "--interval", "0.2"), cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that Ctrl-C is a signal
        )  # fmt: skip
        os.close(theirs)
        self.said = ""

    def read(self, seconds: float = 0.1) -> str:
        while select.select([self._own], [], [], seconds)[0]:
            try:
                data = os.read(self._own, 65536)
            except OSError:  # nobody has the other end any more
                break
            if not data:
                break
            self.said += data.decode(errors="replace")
        return self.said

    def shows(self, text: str) -> None:
        """Wait until a frame from now on has this text."""
        self.said = ""
        until(lambda: text in STYLES.sub("", self.read()), 60)

    def ends(self) -> int:
        """Wait for its end; the terminal must be as it was."""
        until(lambda: self.read() and self.process.poll() is not None, 30)
        self.read()
        assert termios.tcgetattr(self._own) == self.modes
        return self.process.returncode

    def ctrl_c(self) -> int:
        os.write(self._own, b"\x03")
        return self.ends()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._own)


@pytest.mark.processes
@pytest.mark.slow
def test_a_router_that_goes_away_and_comes_back_and_ctrl_c(engines: list[str]):
    router = RouterProcess(engines, "data_parallel")
    port = str(httpx.URL(router.url).port)
    terminal = Terminal(router.url)
    try:
        terminal.shows("strategy  ")
        router.use("prefill_decode")
        terminal.shows("activate")
        router.kill()
        terminal.shows("no answer: ")
        assert terminal.process.poll() is None
        router = RouterProcess(engines, "data_parallel", "--port", port)
        terminal.shows("strategy  data_parallel")
        assert terminal.ctrl_c() == 0
        # The other screen and the hidden cursor are gone, and nothing was printed after them.
        assert terminal.said.rstrip().endswith("\x1b[?25h") or terminal.said.endswith("\x1b[?1049l")
        assert terminal.said.rfind("\x1b[?1049l") > terminal.said.rfind("\x1b[?1049h")
        assert "Traceback" not in terminal.said and "Aborted" not in terminal.said
    finally:
        terminal.close()
        router.kill()


@pytest.mark.processes
@pytest.mark.slow
def test_sigterm_leaves_the_terminal_clean():
    terminal = Terminal("http://127.0.0.1:1")
    try:
        terminal.shows("no answer: ")
        terminal.process.terminate()
        assert terminal.ends() == 128 + signal.SIGTERM
        assert "\x1b[?1049l" in terminal.said and "\x1b[?25h" in terminal.said
        assert "Traceback" not in terminal.said
    finally:
        terminal.close()


def test_the_clock_of_an_away_router_counts(monkeypatch: pytest.MonkeyPatch):
    history = History()
    history.add(frame(time.monotonic() - 12, [engine()]))
    assert "(last one 12 s ago)" in shown(history, away="gone")
