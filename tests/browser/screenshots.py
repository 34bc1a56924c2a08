"""Takes the pictures of the page that docs/dashboard.md shows, on real engines.

Three engines with SmolLM2, one of which prefills, answer questions for `TRAFFIC_S` seconds.
Meanwhile the strategy is swapped, and an engine that decodes is killed, so that charts have a mark
and one request a retry. Then each view is opened, light and dark, with what it is for: the time
lines of the request that survived, a simulation of another strategy on this traffic, a chat with
its receipt.

Run `make screenshots` on an idle machine: the times in the pictures are real. The files go to
docs/screenshots; `--into FOLDER` is for a try.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

INTO = Path(__file__).parents[2] / "docs" / "screenshots"
ENGINES = ("--prefill", "1", "--decode", "2", "--threads", "1")
TRAFFIC_S = 120
SIMULATED = 60  # requests that a simulation needs, at least
CLIENTS = 3
START_S = 300
PATIENT_MS = 300_000  # checks and simulations take seconds of CPU
WIDTH, HEIGHT = 1280, 800
QUALITY = 60
MOST_BYTES = 480_000  # of all pictures together
SURVIVOR = "survives-a-killed-engine"
QUESTIONS = (
    "What is the capital of France?",
    "Tell me a short story about a lighthouse and a storm.",
    "Explain to a child why the sky is blue, and why it is red in the evening.",
    "List five uses of a paper clip. " * 12,
    "Summarize this: " + "engines compute keys and values, and put them into each other. " * 20,
)


class Fleet:
    """A running deployment."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.url: str = state["router"]["url"]
        self.pids = {one["url"]: one["pid"] for one in state["engines"]}
        self.http = httpx.Client(base_url=self.url, timeout=300)

    def get(self, path: str) -> Any:
        return self.http.get(path).raise_for_status().json()

    def ask(self, question: str, tokens: int, id: str = "") -> None:
        """Have a question answered. Raises `httpx.HTTPError` if that fails."""
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": tokens,
                "ignore_eos": True}  # fmt: skip
        headers = {"X-Request-Id": id} if id else {}
        reply = self.http.post("/v1/chat/completions", json=body, headers=headers)
        reply.raise_for_status()

    def use(self, strategy: str) -> None:
        """Make a strategy active."""
        self.http.put("/admin/strategy", json={"name": strategy}).raise_for_status()


@contextmanager
def deployed() -> Iterator[Fleet]:
    """Start `microserve up`, and end it on exit."""
    with tempfile.TemporaryDirectory() as folder:
        state_file = Path(folder) / "state.json"
        command = [sys.executable, "-m", "router", "up", "smollm2", *ENGINES, "--port", "0"]
        command += ["--strategy", "prefill_decode", "--allow-upload"]
        up = subprocess.Popen([*command, "--state-file", str(state_file)], stdout=sys.stderr)
        try:
            give_up = time.monotonic() + START_S
            while not state_file.exists():
                if up.poll() is not None or time.monotonic() > give_up:
                    raise SystemExit("`microserve up` has not started")
                time.sleep(0.2)
            yield Fleet(json.loads(state_file.read_text()))
        finally:
            up.terminate()
            up.wait()


@contextmanager
def traffic(fleet: Fleet) -> Iterator[Callable[[], int]]:
    """Questions from some clients while the body runs. Yields what tells how many have ended."""
    over, ended = threading.Event(), itertools.count()
    done = [0]

    def client(number: int) -> None:
        for question in itertools.islice(itertools.cycle(QUESTIONS), number, None):
            if over.is_set():
                return
            fleet.ask(question, 12 + 8 * (number % 4))
            done[0] = next(ended) + 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for one in clients:
        one.start()
    try:
        yield lambda: done[0]
    finally:
        over.set()
        for one in clients:
            one.join()


def decoding_engine(fleet: Fleet, id: str, tokens: int) -> str:
    """Wait until a request has so many tokens; return the id of the engine that makes them."""
    while True:
        reply = fleet.http.get(f"/admin/requests/{id}")
        for leg in reply.json()["legs"] if reply.status_code == 200 else ():
            if leg["call"] == "start_generate" and leg["tokens"] >= tokens:
                engine: str = leg["engine"]
                return engine
        time.sleep(0.02)


def kill_under_a_stream(fleet: Fleet) -> None:
    """Kill the engine that decodes a long answer, which goes on at the other one."""
    survivor = threading.Thread(target=fleet.ask, args=(QUESTIONS[1], 120, SURVIVOR))
    survivor.start()
    engine = decoding_engine(fleet, SURVIVOR, 20)
    url = next(one["url"] for one in fleet.get("/admin/engines")["engines"] if one["id"] == engine)
    os.kill(fleet.pids[url], signal.SIGKILL)
    survivor.join()
    if not fleet.get(f"/admin/requests/{SURVIVOR}")["retries"]:
        raise SystemExit("the request whose engine was killed has no retry")
    while any(one["status"] != "up" for one in fleet.get("/admin/engines")["engines"]):
        time.sleep(0.5)  # until its next process serves


class Camera:
    """Takes pictures of pages, in both themes."""

    def __init__(self, browser: Browser, fleet: Fleet, into: Path) -> None:
        self._browser, self._fleet, self._into = browser, fleet, into
        self.size = 0

    def opened(self, at: str, theme: str) -> Page:
        page = self._browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=theme, reduced_motion="reduce"
        )
        page.goto(f"{self._fleet.url}/#/{at}")
        page.get_by_text("Live", exact=True).wait_for()
        return page

    def take(self, page: Page, name: str, theme: str) -> None:
        page.wait_for_timeout(1500)  # a snapshot, and fonts
        picture = Image.open(io.BytesIO(page.screenshot()))
        path = self._into / f"{name}-{theme}.webp"
        picture.convert("RGB").save(path, "WEBP", quality=QUALITY, method=6)
        self.size += path.stat().st_size
        print(f"{path} {path.stat().st_size / 1e3:.0f} KB")


THEMES = ("light", "dark")


def while_it_runs(camera: Camera, pages: dict[tuple[str, str], Page]) -> None:
    """Views whose subject is what happens now; they have been open since the traffic began."""
    for (name, theme), page in pages.items():
        camera.take(page, name, theme)


def afterwards(camera: Camera) -> None:
    """Views of what has happened, and of tools."""
    for theme in THEMES:
        page = camera.opened(f"requests/{SURVIVOR}", theme)
        page.locator(".waterfall").wait_for()
        camera.take(page, "request", theme)
        page.close()

        page = camera.opened("playground", theme)
        page.get_by_label("Max tokens").fill("60")
        page.get_by_label("Message").fill(QUESTIONS[1])
        page.get_by_label("Message").press("Enter")
        page.locator(".facts a").wait_for(timeout=PATIENT_MS)
        camera.take(page, "playground", theme)
        page.close()

        page = camera.opened("strategies/balanced", theme)
        page.get_by_role("button", name="Simulate", exact=True).click()
        result = page.locator(".simulated")
        result.wait_for(timeout=PATIENT_MS)
        title = page.get_by_role("heading", name="Simulate on recorded traffic")
        title.evaluate("title => title.closest('section').scrollIntoView({block: 'end'})")
        camera.take(page, "strategies", theme)
        page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--into", type=Path, default=INTO, help="folder of the pictures")
    parser.add_argument("--seconds", type=int, default=TRAFFIC_S, help="of traffic, at least")
    given = parser.parse_args()
    given.into.mkdir(parents=True, exist_ok=True)
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        raise SystemExit("no browser is installed: apt install chromium, or set CHROMIUM")
    with deployed() as fleet, sync_playwright() as playwright:
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        camera = Camera(browser, fleet, given.into)
        pages = {
            (name, theme): camera.opened(name, theme)
            for name in ("fleet", "requests", "latency")
            for theme in THEMES
        }
        with traffic(fleet) as ended:  # those that run end before the last pictures are taken
            began = time.monotonic()
            time.sleep(given.seconds / 3)
            kill_under_a_stream(fleet)
            fleet.use("balanced")
            while time.monotonic() - began < given.seconds or ended() < SIMULATED:
                time.sleep(0.5)
            while_it_runs(camera, pages)
        for page in pages.values():
            page.close()
        fleet.use("prefill_decode")
        afterwards(camera)
        browser.close()
    print(f"{camera.size / 1e3:.0f} KB in all")
    if camera.size > MOST_BYTES:
        raise SystemExit(f"the pictures shall have {MOST_BYTES / 1e3:.0f} KB in all, at most")


if __name__ == "__main__":
    main()
