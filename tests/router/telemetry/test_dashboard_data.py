"""On a real fleet with everything on, no panel of the dashboard is empty and no alert is blind."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from engine_process import EngineProcess
from monitoring_files import ALERTS, DASHBOARD, PANELS, RULES, expression, metrics_of
from prometheus_server import PrometheusServer, needs_prometheus
from router_process import RouterProcess, until

pytestmark = [pytest.mark.processes, pytest.mark.slow, needs_prometheus]

# These have data once an engine has died.
LATER = {"Retries and fallbacks"}
STRATEGY = """
import time
from router import Cluster, Request, strategy
from strategies.prefill_decode import prefill_decode

@strategy
async def offends(request: Request, cluster: Cluster):
    \"\"\"Stops the event loop for some prompts, and leaves the rest to another strategy.\"\"\"
    if request.tokens[0] == 7:
        time.sleep(0.7)
    async for chunk in prefill_decode(request, cluster):
        yield chunk
"""


class Fleet:
    """Two engines and a router, under load until it is closed."""

    def __init__(self) -> None:
        flags = ("--pool-pages", "400", "--host-pages", "64", "--lend-share", "0.2")
        self.engines = {
            role: EngineProcess(*flags, "--role", role, "--engine-id", role, secret="ab" * 32)
            for role in ("prefill", "decode")
        }
        urls = [one.url for one in self.engines.values()]
        self.router = RouterProcess(urls, "prefill_decode", "--allow-upload")
        self._over = threading.Event()
        self._pool = ThreadPoolExecutor(4)

    def start(self) -> None:
        until(lambda: self.router.http.get("/health").json()["engines"]["up"] == 2)
        for number in range(3):
            self._pool.submit(self._load, number)

    def _load(self, number: int) -> None:
        shared = [(n * 7) % 250 for n in range(1, 100)]
        while not self._over.is_set():
            self.router.ask([*shared, number, int(time.monotonic() * 1e3) % 250], 8)
            self._over.wait(0.1)

    def close(self) -> None:
        self._over.set()
        self._pool.shutdown()
        self.router.kill()
        for engine in self.engines.values():
            engine.kill()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, PrometheusServer]]:
    folder = tmp_path_factory.mktemp("fleet")
    made = Fleet()
    jobs = {
        "microserve-router": [made.router.url.removeprefix("http://")],
        "microserve-engine": [e.url.removeprefix("http://") for e in made.engines.values()],
    }
    server = PrometheusServer(folder, jobs, ALERTS)
    try:
        made.start()
        yield made, server
    finally:
        server.close()
        made.close()


def provoke(fleet: Fleet) -> None:
    """Have everything happen that is counted under labels: swaps, canaries, offences, retries."""
    http = fleet.router.http
    loaded = http.post("/admin/strategies", json={"source": STRATEGY, "name": "offends"})
    assert loaded.status_code == 201, loaded.text
    canary = {"percent": 100, "min_requests": 1}
    body = {"name": "offends", "canary": canary}
    assert http.put("/admin/strategy", json=body).status_code == 200
    until(lambda: fleet.router.strategies()["canary"] is None)
    assert fleet.router.ask([7, 7, 7], 2).status_code == 200
    until(lambda: "strategy_offences_total{" in http.get("/metrics").text)


def kill_at_work(fleet: Fleet) -> None:
    """Kill the prefill engine while it has requests: those are retried."""
    engine = fleet.engines["prefill"]
    engine.signal(signal.SIGSTOP)  # what it is sent from now on waits for it

    def at_work() -> bool:
        text = fleet.router.http.get("/metrics").text
        load = re.search(r'^microserve_router_engine_load{engine="prefill"} (\S+)', text, re.M)
        return load is not None and float(load[1]) > 0

    until(at_work)
    engine.kill()
    until(lambda: "retries_total{" in fleet.router.http.get("/metrics").text)


def queries(later: bool) -> dict[tuple[str, str], str]:
    """Return the queries of the panels, by title and legend."""
    return {
        (panel["title"], target["legendFormat"]): expression(target)
        for panel in PANELS
        for target in panel["targets"]
        if (panel["title"] in LATER) == later
    }


def check_filled(server: PrometheusServer, empty: dict[tuple[str, str], str]) -> None:
    def filled() -> bool:
        for place, query in [*empty.items()]:
            if server.query(query):
                del empty[place]
        return not empty

    try:
        until(filled, 40)
    except AssertionError:
        pytest.fail(f"panels without data: {empty}")


def test_no_panel_is_empty_and_every_alert_watches_a_metric_that_there_is(
    fleet: tuple[Fleet, PrometheusServer],
):
    made, server = fleet
    provoke(made)
    pages = [one.http.get("/metrics").text for one in (made.router, *made.engines.values())]
    exported = set(re.findall(r"^# TYPE (\S+)", "\n".join(pages), re.M))
    asked = [target["expr"] for panel in PANELS for target in panel["targets"]]
    for text in asked + [rule["expr"] for rule in RULES]:
        assert metrics_of(text) <= exported, text
    check_filled(server, queries(later=False))
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            selector = re.fullmatch(r"label_values\((.*), (\w+)\)", one["definition"])
            assert selector is not None and server.get("/series", **{"match[]": selector[1]})
    rules = [rule for group in server.get("/rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == {rule["alert"] for rule in RULES}
    assert all(rule["health"] == "ok" for rule in rules), rules
    until(lambda: server.query("ALERTS{alertname='MicroserveStrategyOffends'}"))
    kill_at_work(made)
    check_filled(server, queries(later=True))
    until(lambda: server.query("ALERTS{alertname='MicroserveEngineUnreachable'}"))
    until(lambda: server.query("microserve_router_engine_up == 0"))
