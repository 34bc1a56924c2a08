"""`microserve router --workers 2`: processes on one port that act as one router."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from engine_process import EngineProcess
from router_process import RouterProcess, until

from router.agreement.membership import ROUND_S

pytestmark = [pytest.mark.processes, pytest.mark.slow]

RPM = 60
STEP_MS = 20


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    running = EngineProcess("--step-ms", str(STEP_MS), secret="ab" * 32, model="mock")
    try:
        yield running.url
    finally:
        running.kill()


@pytest.fixture(scope="module")
def router(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RouterProcess]:
    keys = tmp_path_factory.mktemp("workers") / "keys"
    keys.write_text(f"free\ntight rpm={RPM}\n")
    flags = ("--workers", "2", "--api-key-file", str(keys), "--shutdown-s", "20")
    started = RouterProcess([engine], "data_parallel", *flags)
    try:
        yield started
    finally:
        started.kill()


def connection(router: RouterProcess, key: str = "free") -> httpx.Client:
    """Return a client with a connection of its own, so that any worker may serve it."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=router.url, headers=headers, timeout=30)


def worker_of(http: httpx.Client) -> str:
    return http.get("/health").json()["store"]["router"]


def connections(router: RouterProcess) -> dict[str, httpx.Client]:
    """Return a client of each worker, by the worker's name."""
    found: dict[str, httpx.Client] = {}
    until(lambda: found.setdefault(worker_of(http := connection(router)), http) and len(found) == 2)
    return found


def ask(http: httpx.Client) -> httpx.Response:
    body = {"prompt": [5, 6, 7], "max_tokens": 1, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


def total(http: httpx.Client) -> float:
    lines = http.get("/metrics").text.splitlines()
    name = "microserve_router_requests_total{"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_a_swap_through_one_worker_is_seen_by_all_requests_afterwards(router: RouterProcess):
    clients = list(connections(router).values())
    before = router.strategies()["active"]["generation"]
    for number in range(20):
        swapper, other = clients[number % 2], clients[1 - number % 2]
        name = ("prefill_decode", "data_parallel")[number % 2]
        reply = swapper.put("/admin/strategy", json={"name": name})
        assert reply.json()["generation"] == before + 1 + number, reply.text
        served = ask(other)
        assert served.status_code == 200, served.text
        # Whichever worker is asked has the receipt.
        for http in clients:
            told = http.get(f"/admin/requests/{served.headers['x-request-id']}").json()
            assert (told["generation"], told["strategy"]) == (before + 1 + number, name)
    assert clients[0].get("/admin/requests/absent").status_code == 404
    logs = [http.get("/admin/audit").json()["entries"] for http in clients]
    assert logs[0] == logs[1]


def test_metrics_and_limits_are_those_of_all_workers(router: RouterProcess):
    clients = list(connections(router).values())
    # A worker that takes more than a second to answer is represented by its latest answer.
    until(lambda: total(clients[0]) == total(clients[1]))
    before = total(clients[0])
    for http in clients * 3:
        assert ask(http).status_code == 200
    until(lambda: total(clients[0]) == total(clients[1]) == before + 6)
    tight = [connection(router, "tight") for _ in range(6)]
    began = time.monotonic()
    assert ask(tight[0]).status_code == 200
    first_reply, admitted, refused, last_sent = time.monotonic(), 1, 0, 0.0
    while refused < 12:
        for http in tight:
            sent = time.monotonic()
            if ask(http).status_code == 200:
                admitted += 1
            else:
                refused, last_sent = refused + 1, sent
    least = RPM + (last_sent - first_reply) * RPM / 60 - 1  # what is left is less than one
    most = RPM + (time.monotonic() - began) * RPM / 60
    assert admitted >= 0.99 * least - 1
    if "this router admits 1/" not in router.log:  # as it does if the machine stands still
        assert admitted <= 1.01 * most


def test_a_time_line_has_the_requests_of_all_workers(router: RouterProcess):
    clients = list(connections(router).values())
    ids = {ask(http).headers["x-request-id"] for http in clients}
    for http in clients:
        events = http.get("/admin/trace?seconds=60").json()["traceEvents"]
        assert ids <= {one["args"].get("request") for one in events if one["ph"] == "X"}


def test_a_worker_that_is_killed_is_replaced_and_streams_of_the_other_live_on(
    router: RouterProcess,
):
    clients = connections(router)
    doomed, survivor = list(clients)
    generation = router.strategies()["active"]["generation"]
    counted = total(clients[survivor])
    tokens: list[int] = []
    body = {
        "prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip

    def stream() -> None:
        with clients[survivor].stream("POST", "/v1/completions", json=body) as reply:
            for line in reply.iter_lines():
                tokens.append(line.count("token_ids"))

    streaming = threading.Thread(target=stream)
    streaming.start()
    until(lambda: tokens)
    with clients[doomed].stream("POST", "/v1/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        os.kill(int(doomed.removeprefix("worker-")), signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            list(lines)
    replaced = connections(router)
    assert survivor in replaced and doomed not in replaced
    streaming.join(60)
    assert sum(tokens) > 0 and not streaming.is_alive()
    for http in replaced.values():
        told = http.get("/admin/strategies").json()
        assert told["active"]["generation"] == generation
        assert ask(http).status_code == 200
    # What the dead worker had counted is still counted.
    until(lambda: total(replaced[survivor]) == counted + 3)


def test_any_worker_tells_of_the_requests_of_all(router: RouterProcess):
    clients = connections(router)
    ids = {ask(http).headers["x-request-id"] for http in clients.values()}
    assert len(ids) == 2
    for http in clients.values():
        listed = http.get("/admin/requests?state=ended").json()["requests"]
        assert ids <= {one["id"] for one in listed}
        ages = [one["created"] for one in listed]
        assert ages == sorted(ages, reverse=True)

    def seen() -> bool:
        for each in clients.values():
            ask(each)
        with http.stream("GET", "/admin/live") as reply:
            line = next(line for line in reply.iter_lines() if line.startswith("data: "))
        told = json.loads(line.removeprefix("data: "))
        # Without a worker that takes more than a second to answer.
        return told["workers"] == 2 and sum(one["requests"] for one in told["latency"]) >= 2

    until(seen)


def test_workers_end_with_their_parent(engine: str):
    router = RouterProcess([engine], "data_parallel", "--workers", "2")
    workers = psutil.Process(router.pid).children()
    assert len(workers) == 2
    router.signal(signal.SIGKILL)
    until(lambda: not any(worker.is_running() for worker in workers))
    router.kill()


def test_a_worker_that_cannot_start_ends_the_parent(engine: str, tmp_path: Path):
    with pytest.raises(Exception, match="no strategy 'absent'"):
        RouterProcess([engine], "absent", "--workers", "2")


@pytest.mark.thorough
def test_a_worker_that_does_not_answer_is_replaced(router: RouterProcess):
    clients = connections(router)
    stopped, survivor = list(clients)
    os.kill(int(stopped.removeprefix("worker-")), signal.SIGSTOP)
    gone = psutil.Process(int(stopped.removeprefix("worker-")))
    until(lambda: not gone.is_running(), timeout=60)
    replaced = connections(router)
    assert survivor in replaced and stopped not in replaced
    assert all(ask(http).status_code == 200 for http in replaced.values())


def test_sigterm_finishes_what_runs_and_ends_all_processes(router: RouterProcess):
    """The last one: it ends the router of this module."""
    workers = psutil.Process(router.pid).children()
    replies: list[httpx.Response] = []
    body = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True}

    def slow() -> None:
        with connection(router) as http:
            replies.append(http.post("/v1/completions", json=body))

    asking = [threading.Thread(target=slow) for _ in range(4)]
    for one in asking:
        one.start()
    name = "microserve_router_requests_in_flight "

    def running() -> bool:
        lines = router.http.get("/metrics").text.splitlines()
        return any(line == f"{name}4.0" for line in lines)

    until(running)
    router.signal(signal.SIGTERM)
    for one in asking:
        one.join(30)
    assert [reply.status_code for reply in replies] == [200] * 4
    assert router.wait() == 0
    assert not any(worker.is_running() for worker in workers)


def test_an_engine_that_leaves_the_file_is_forgotten_by_all_workers(engine: str, tmp_path: Path):
    other = EngineProcess("--step-ms", str(STEP_MS), secret="ab" * 32, model="mock")
    file = tmp_path / "engines"
    file.write_text(f"{engine}\n{other.url}")
    router = RouterProcess([], "data_parallel", "--workers", "2", "--engines-file", str(file))
    try:
        workers = list(connections(router).values())

        def known() -> list[set[str]]:
            told = [http.get("/admin/engines").json()["engines"] for http in workers]
            return [{each["url"] for each in engines} for engines in told]

        until(lambda: known() == [{engine, other.url}] * 2)
        file.write_text(engine)
        until(lambda: known() == [{engine}] * 2)
        time.sleep(2 * ROUND_S)
        assert known() == [{engine}] * 2
    finally:
        router.kill()
        other.kill()
