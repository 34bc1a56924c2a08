"""Router processes that agree by a real Redis, which is killed."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_process import EngineProcess
from redis_server import RedisServer, needs_redis
from router_process import RouterProcess, until

from router.agreement.membership import MEMBER_S, ROUND_S

pytestmark = [pytest.mark.processes, pytest.mark.slow, *needs_redis]

ROUTERS = 3
CLIENTS = 4
RPM = 60
STRATEGIES = ["data_parallel", "prefill_decode", "balanced"]
WIDE_RPM = 1200
TPM = 600  # of a key without a limit of requests
KEYS = (
    f"free\ntight name=tight rpm={RPM}\nwide name=wide rpm={WIDE_RPM}\n"
    f"tokens name=tokens tpm={TPM}\n"
)
FREE, TIGHT, WIDE, TOKENS = (
    {"Authorization": f"Bearer {key}"} for key in ("free", "tight", "wide", "tokens")
)
UPLOADED = '''
from router import strategy

@strategy
async def uploaded(request, cluster):
    """Says which version runs."""
    version = {version}
    engine = cluster.engines.round_robin()
    async for chunk in engine.start_generate(request, begin=0):
        yield chunk
'''


class Fleet:
    """Routers of one store, in front of the same engines."""

    def __init__(self, engines: list[str], folder: Path, *, keeps: bool) -> None:
        self.redis = RedisServer(keeps=keeps)
        keys = folder / "keys"
        keys.write_text(KEYS)
        self.flags = ["--store", self.redis.url, "--api-key-file", str(keys), "--allow-upload"]
        self.engines = engines
        self.routers: list[RouterProcess] = []

    def start(self, count: int = 1, *flags: str, engines: bool = True) -> RouterProcess:
        urls = self.engines if engines else []
        with ThreadPoolExecutor(count) as pool:
            self.routers += pool.map(
                lambda _: RouterProcess(urls, "data_parallel", *self.flags, *flags), range(count)
            )
        return self.routers[-1]

    def health(self) -> list[dict[str, Any]]:
        return [router.http.get("/health").json() for router in self.routers]

    def generations(self) -> list[int]:
        return [router.strategies()["active"]["generation"] for router in self.routers]

    def lost(self) -> list[bool]:
        return [told["store"]["status"] == "lost" for told in self.health()]

    def close(self) -> None:
        for router in self.routers:
            router.kill()
        self.redis.close()


@pytest.fixture(scope="module")
def engines() -> Iterator[list[str]]:
    running = [EngineProcess("--step-ms", "1", secret="ab" * 32, model="mock") for _ in range(2)]
    try:
        yield [engine.url for engine in running]
    finally:
        for engine in running:
            engine.kill()


@pytest.fixture(scope="module")
def fleet(engines: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(engines, tmp_path_factory.mktemp("fleet"), keeps=True)
    try:
        fleet.start(ROUTERS)
        yield fleet
    finally:
        fleet.close()


class Swaps:
    """The swaps that a router tells of at `/admin/events`, in the order in which it made them."""

    def __init__(self, router: RouterProcess) -> None:
        self._router = router
        self._ready, self._over = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self.made: list[tuple[int, str]] = []
        self._done = self._pool.submit(self._follow)
        self._done.add_done_callback(lambda _: self._ready.set())
        assert self._ready.wait(30)

    def _follow(self) -> None:
        kind = ""
        with self._router.http.stream("GET", "/admin/events", timeout=60) as reply:
            assert reply.status_code == 200
            for line in reply.iter_lines():
                self._ready.set()
                if self._over.is_set():
                    return
                name, _, value = line.partition(": ")
                if name == "event":
                    kind = value
                elif name == "data" and kind == "swap":
                    told = json.loads(value)
                    self.made.append((told["generation"], told["name"]))
        raise AssertionError("the router ended its events")

    def end(self) -> list[tuple[int, str]]:
        """Stop, and return all swaps. Raises what ended it before."""
        self._over.set()
        with self._pool:
            if not self._done.done():
                ask(self._router)  # an event, so that it wakes
            self._done.result(30)
        return self.made


def ask(router: RouterProcess, headers: dict[str, str] = FREE) -> httpx.Response:
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
    return router.http.post("/v1/completions", json=body, headers=headers)


def generation_of(router: RouterProcess, reply: httpx.Response) -> tuple[int, str]:
    assert reply.status_code == 200, reply.text
    told = router.http.get(f"/admin/requests/{reply.headers['x-request-id']}").json()
    return told["generation"], told["strategy"]


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_a_thousand_swaps_through_four_routers_while_the_store_dies(engines, tmp_path):
    fleet = Fleet(engines, tmp_path, keeps=True)
    try:
        fleet.start(4)
        swaps_are_one_sequence(fleet, 1000, kill_after=500)
    finally:
        fleet.close()


def test_swaps_through_any_router_are_one_sequence(fleet: Fleet):
    swaps_are_one_sequence(fleet, 40)


def swaps_are_one_sequence(fleet: Fleet, swaps: int, *, kill_after: int | None = None) -> None:
    """Swap through random routers under load; kill the store after so many swaps and restart it."""
    began, routers = fleet.generations()[0], len(fleet.routers)
    assert fleet.generations() == [began] * routers
    first = (began, fleet.routers[0].strategies()["active"]["name"])
    followed = [Swaps(router) for router in fleet.routers]
    over = threading.Event()
    seen: set[tuple[int, str]] = set()
    newest = [began]  # that an answer to a swap has named
    refused: list[str] = []

    def client(number: int) -> int:
        source, rounds = random.Random(number), 0
        while not over.is_set():
            router = source.choice(fleet.routers)
            least = newest[0]
            generation, name = generation_of(router, ask(router))
            assert generation >= least, "a request ran under an older generation after the swap"
            seen.add((generation, name))
            rounds += 1
        return rounds

    def swapper(number: int) -> list[tuple[int, str]]:
        source, made = random.Random(100 + number), []
        kill_at = kill_after // 2 if kill_after is not None and number == 0 else -1
        while len(made) < swaps // 2:
            if len(made) == kill_at:
                kill_at = -1  # once, though the next swaps may be refused
                fleet.redis.kill()
                time.sleep(1)
                fleet.redis.start()
            router, name = source.choice(fleet.routers), source.choice(STRATEGIES)
            reply = router.http.put("/admin/strategy", json={"name": name})
            if kill_after is not None and reply.status_code == 503:
                refused.append(reply.json()["error"]["type"])
                time.sleep(0.1)
                continue
            assert reply.status_code == 200, reply.text
            told = reply.json()
            assert kill_after is not None or "pending_routers" not in told, told
            newest[0] = max(newest[0], told["generation"])
            made.append((told["generation"], told["name"]))
        return made

    with ThreadPoolExecutor(CLIENTS + 2) as pool:
        clients = [pool.submit(client, number) for number in range(CLIENTS)]
        try:
            made = [one for n in (pool.submit(swapper, n) for n in range(2)) for one in n.result()]
        finally:
            over.set()
        assert all(done.result() > 0 for done in clients)
    numbers = sorted(number for number, _ in made)
    if kill_after is None:
        assert numbers == list(range(began + 1, began + 1 + 2 * (swaps // 2)))
    else:  # a change whose answer was lost with the store may count
        assert set(refused) == {"store_unavailable"}
        assert len(set(numbers)) == len(numbers)
    until(lambda: len(set(fleet.generations())) == 1)
    assert fleet.generations()[0] >= numbers[-1]
    final = fleet.generations()[0]
    until(lambda: all(one.made and one.made[-1][0] == final for one in followed))
    logs = [router.http.get("/admin/audit").json()["entries"] for router in fleet.routers]
    assert all(log == logs[0] for log in logs)
    oldest_entry = logs[0][0]["number"]
    assert [e["number"] for e in logs[0]] == list(range(oldest_entry, oldest_entry + len(logs[0])))
    active = [(e["generation"], e["name"]) for e in logs[0] if e["what"] == "activate"]
    assert active == sorted(active)
    oldest = active[0][0]
    assert {one for one in made if one[0] >= oldest} <= set(active)
    # The log keeps the newest 1000 entries. The store dies long after the first swaps, so that
    # those whose entries are gone were all answered.
    known = {(e["generation"], e["name"]) for e in logs[0] if "generation" in e}
    known |= {first, *made}
    assert seen <= known
    assert len({number for number, _ in known}) == len(known), "a generation has one name"
    for one in followed:
        told = one.end()
        numbers = [number for number, _ in told]
        assert numbers == sorted(set(numbers)), "a router went back"
        assert set(told) <= known


def test_of_two_conditional_swaps_one_wins(fleet: Fleet):
    now = fleet.generations()[0]
    wanted = {"name": "balanced", "if_generation": now}
    with ThreadPoolExecutor(ROUTERS) as pool:
        replies = list(
            pool.map(lambda one: one.http.put("/admin/strategy", json=wanted), fleet.routers)
        )
    assert sorted(reply.status_code for reply in replies) == [200, *[409] * (ROUTERS - 1)]
    until(lambda: fleet.generations() == [now + 1] * ROUTERS)


def test_a_canary_is_judged_by_the_requests_of_all_routers(fleet: Fleet):
    canary = {"percent": 100, "min_requests": 20, "max_error_rate": 0.5}
    wanted = {"name": "prefill_decode", "canary": canary}
    reply = fleet.routers[0].http.put("/admin/strategy", json=wanted).json()
    assert reply["canary"]
    for number in range(20):
        assert ask(fleet.routers[number % ROUTERS]).status_code == 200
    until(lambda: fleet.generations() == [reply["generation"]] * ROUTERS)
    states = [router.strategies() for router in fleet.routers]
    assert all(state["canary"] is None for state in states)
    assert {state["last_canary"]["decision"] for state in states} == {"promoted"}
    assert {state["last_canary"]["ended"] for state in states} == {20}


def test_an_uploaded_strategy_is_the_same_everywhere(fleet: Fleet):
    for version, router in enumerate(fleet.routers[:2]):
        source = UPLOADED.format(version=version)
        loaded = router.http.post("/admin/strategies", json={"name": "uploaded", "source": source})
        assert loaded.status_code == 201, loaded.text
        # At once through another router:
        other = fleet.routers[2 - version]
        reply = other.http.put("/admin/strategy", json={"name": "uploaded"})
        assert reply.status_code == 200, reply.text
        active = [one.strategies()["active"] for one in fleet.routers]
        assert {one["source_sha256"] for one in active} == {loaded.json()["source_sha256"]}
        assert ask(fleet.routers[2]).status_code == 200
    # The one before it has another source, which is still stored.
    reply = fleet.routers[2].http.post("/admin/rollback")
    assert reply.status_code == 200
    late = fleet.start(engines=False)
    try:
        until(lambda: late.http.get("/health").json()["engines"]["up"] == 2)
        active = [one.strategies()["active"] for one in fleet.routers]
        assert len({(one["generation"], one["source_sha256"]) for one in active}) == 1
        assert active[0]["source_sha256"] != loaded.json()["source_sha256"]
        assert ask(late).status_code == 200
    finally:
        fleet.routers.remove(late)
        late.kill()


def test_limits_hold_over_all_routers(fleet: Fleet):
    limit_holds(fleet, TIGHT, RPM)


@pytest.mark.thorough
def test_a_large_limit_holds_within_a_percent(fleet: Fleet):
    limit_holds(fleet, WIDE, WIDE_RPM)


def limit_holds(fleet: Fleet, key: dict[str, str], rpm: int) -> None:
    """Use up a key's limit through all routers at once, and more than it allows for a while."""
    began, admitted, refused, last_sent = time.monotonic(), 0, 0, 0.0
    assert ask(fleet.routers[0], key).status_code == 200
    first_reply, admitted = time.monotonic(), 1
    with ThreadPoolExecutor(ROUTERS) as pool:
        while refused < 30:
            sent = time.monotonic()
            replies = list(pool.map(lambda router: ask(router, key), fleet.routers))
            codes = [reply.status_code for reply in replies]
            assert set(codes) <= {200, 429}
            admitted += codes.count(200)
            if 429 in codes:
                refused, last_sent = refused + codes.count(429), sent
    least = rpm + (last_sent - first_reply) * rpm / 60 - 1  # what is left is less than one
    most = rpm + (time.monotonic() - began) * rpm / 60
    assert admitted >= 0.99 * least - 1
    # On a machine that stands still for a second a router admits its share, and says so.
    if not any("this router admits 1/" in router.log for router in fleet.routers):
        assert admitted <= 1.01 * most


def test_a_limit_of_tokens_holds_over_all_routers(fleet: Fleet):
    """Tokens are known when an answer ends: what is admitted until then comes on top."""
    began, refused, last_sent = time.monotonic(), 0, 0.0
    first = ask(fleet.routers[0], TOKENS).json()["usage"]["total_tokens"]
    first_reply = time.monotonic()
    counted = [first, *[0] * (ROUTERS - 1)]  # by the router that answered
    with ThreadPoolExecutor(ROUTERS) as pool:
        while refused < 30:
            sent = time.monotonic()
            replies = list(pool.map(lambda router: ask(router, TOKENS), fleet.routers))
            assert {reply.status_code for reply in replies} <= {200, 429}
            for number, reply in enumerate(replies):
                if reply.status_code == 200:
                    counted[number] += reply.json()["usage"]["total_tokens"]
                else:
                    assert reply.json()["error"]["type"] == "rate_limit_error"
                    refused, last_sent = refused + 1, sent
    assert all(counted[1:]), "each router admits some"
    # Of each router one request at most is in flight. One more may have ended without being
    # counted in the store yet.
    pending = 2 * ROUTERS * first
    least = TPM + (last_sent - first_reply) * TPM / 60
    assert sum(counted) >= 0.99 * least - pending
    # A router that stands still for a second admits its share of the limit, and says so.
    if not any("this router admits 1/" in router.log for router in fleet.routers):
        most = TPM + (time.monotonic() - began) * TPM / 60
        assert sum(counted) <= 1.01 * most + pending


def test_a_store_that_dies_and_remembers(fleet: Fleet):
    before = fleet.generations()[0]
    # A router that was killed counts for a while.
    until(lambda: all(told["store"]["routers"] == ROUTERS for told in fleet.health()))
    fleet.redis.kill()
    until(lambda: all(fleet.lost()))
    for told in fleet.health():
        assert (told["status"], told["store"]["generation"]) == ("ok", before)
    for router in fleet.routers:
        assert generation_of(router, ask(router))[0] == before
        for call in (
            lambda http: http.put("/admin/strategy", json={"name": "balanced"}),
            lambda http: http.post("/admin/rollback"),
            lambda http: http.post("/admin/strategies", json={"name": "new", "source": "x = 1"}),
        ):
            reply = call(router.http)
            assert reply.status_code == 503
            assert reply.json()["error"]["type"] == "store_unavailable"
    # Each router admits its share of a limit.
    with ThreadPoolExecutor(ROUTERS) as pool:
        share = list(
            pool.map(
                lambda one: [ask(one, TIGHT).status_code for _ in range(RPM)].count(200),
                fleet.routers,
            )
        )
    assert all(RPM // ROUTERS <= one < RPM for one in share), share
    fleet.redis.start()
    until(lambda: not any(fleet.lost()))
    assert fleet.generations() == [before] * ROUTERS
    assert fleet.routers[1].use("balanced") == before + 1
    assert fleet.generations() == [before + 1] * ROUTERS


def test_a_router_that_was_stopped_serves_no_generation_that_the_others_have_left(fleet: Fleet):
    sleeper, other = fleet.routers[0], fleet.routers[1]
    until(lambda: all(told["store"]["routers"] == ROUTERS for told in fleet.health()))
    name = sleeper.http.get("/health").json()["store"]["router"]
    sleeper.signal(signal.SIGSTOP)
    with ThreadPoolExecutor(8) as pool:
        try:
            reply = other.http.put("/admin/strategy", json={"name": "balanced"}).json()
            assert reply["pending_routers"] == [name]
            waiting = [pool.submit(ask, sleeper) for _ in range(8)]
            time.sleep(0.2)
        finally:
            sleeper.signal(signal.SIGCONT)
        for one in waiting:
            assert generation_of(sleeper, one.result()) == (reply["generation"], "balanced")


def test_a_router_that_cannot_load_a_strategy_keeps_the_old_one_and_says_so(fleet: Fleet, tmp_path):
    (tmp_path / "beside_it.py").write_text("VALUE = 1\n")
    (tmp_path / "with_module.py").write_text(
        UPLOADED.format(version="beside_it.VALUE").replace("uploaded", "with_module")
        + "\nimport beside_it\n"
    )
    first = fleet.routers[0]
    assert first.use("data_parallel")
    has_it = RouterProcess(fleet.engines, tmp_path / "with_module.py", *fleet.flags)
    fleet.routers.append(has_it)
    try:
        [before] = set(fleet.generations())  # the store decides, not --strategy
        names = sorted(told["store"]["router"] for told in fleet.health()[:ROUTERS])
        reply = has_it.http.put("/admin/strategy", json={"name": "with_module"}).json()
        assert reply["pending_routers"] == names
        now = reply["generation"]
        assert fleet.generations() == [*[before] * ROUTERS, now]
        said = first.http.get("/health").json()["store"]
        assert "beside_it" in said["cannot_load"]["with_module"]
        assert generation_of(first, ask(first)) == (before, "data_parallel")
        assert generation_of(has_it, ask(has_it)) == (now, "with_module")
        assert has_it.use("balanced") == now + 1
        assert fleet.generations() == [now + 1] * (ROUTERS + 1)
    finally:
        fleet.routers.remove(has_it)
        has_it.kill()


def test_what_is_ordered_for_engines_through_one_router_holds_for_all(fleet: Fleet):
    def known(router: RouterProcess) -> dict[str, dict[str, Any]]:
        told = router.http.get("/admin/engines").json()["engines"]
        return {one["url"]: one for one in told}

    first, other, third = fleet.routers
    url = fleet.engines[0]
    id = known(other)[url]["id"]
    reply = other.http.patch(f"/admin/engines/{id}", json={"draining": True})
    assert reply.status_code == 200, reply.text
    until(lambda: all(known(one)[url]["draining"] for one in fleet.routers))
    assert other.http.delete(f"/admin/engines/{id}").status_code == 200
    until(lambda: all(list(known(one)) == [fleet.engines[1]] for one in fleet.routers))
    assert third.http.post("/admin/engines", json={"url": url}).status_code == 200
    until(lambda: all(len(known(one)) == 2 for one in fleet.routers))
    assert not known(first)[url]["draining"]


def urls_of(router: RouterProcess) -> list[str]:
    return [one["url"] for one in router.http.get("/admin/engines").json()["engines"]]


def test_an_engine_that_leaves_the_files_is_forgotten_by_all(engines: list[str], tmp_path: Path):
    """Under load. A router without a file follows; one that a flag told of it keeps it."""
    files = [tmp_path / "first", tmp_path / "second"]
    both, one = "\n".join(engines), engines[1]
    fleet = Fleet(engines, tmp_path, keeps=False)
    try:
        for file in files:
            file.write_text(both)
            fleet.start(1, "--engines-file", str(file), engines=False)
        fleet.start(engines=False)
        until(lambda: all(len(urls_of(router)) == 2 for router in fleet.routers))
        over = threading.Event()

        def load(router: RouterProcess) -> list[int]:
            found = []
            with httpx.Client(base_url=router.url, headers=FREE, timeout=30) as http:
                while not over.is_set():
                    body = {"prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True}
                    found.append(http.post("/v1/completions", json=body).status_code)
            return found

        with ThreadPoolExecutor(len(fleet.routers)) as pool:
            running = [pool.submit(load, router) for router in fleet.routers]
            try:
                files[0].write_text(one)
                until(lambda: urls_of(fleet.routers[0]) == [one])
                time.sleep(3 * ROUND_S)  # the second file still names it
                assert urls_of(fleet.routers[0]) == [one]
                assert sorted(urls_of(fleet.routers[1])) == sorted(engines)
                files[1].write_text(one)
                until(lambda: all(urls_of(router) == [one] for router in fleet.routers))
                time.sleep(MEMBER_S + ROUND_S)  # nothing that was announced brings it back
                assert all(urls_of(router) == [one] for router in fleet.routers)
                files[0].write_text(both)
                until(lambda: all(len(urls_of(router)) == 2 for router in fleet.routers))
            finally:
                over.set()
            for each in running:
                assert set(each.result()) == {200}
    finally:
        fleet.close()


def test_a_store_that_returns_empty_gets_the_newest_truth_back(fleet: Fleet):
    source = UPLOADED.format(version=7)
    made = fleet.routers[0].http.post(
        "/admin/strategies", json={"name": "uploaded", "source": source}
    )
    assert made.status_code == 201, made.text
    before = fleet.routers[0].use("uploaded")
    fleet.redis.kill()
    until(lambda: all(fleet.lost()))
    fleet.redis.start_empty()
    until(lambda: not any(fleet.lost()) and fleet.generations() == [before] * ROUTERS)
    active = [one.strategies()["active"] for one in fleet.routers]
    assert {one["name"] for one in active} == {"uploaded"}
    entries = fleet.routers[1].http.get("/admin/audit").json()["entries"]
    assert "restored" in [entry["what"] for entry in entries]
    number = fleet.routers[2].use("balanced")
    assert number > before + 1000  # numbers that were lost are not given again
    assert fleet.generations() == [number] * ROUTERS
