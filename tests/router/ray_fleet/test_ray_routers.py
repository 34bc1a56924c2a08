"""Two routers of one store on a Ray cluster: one strategy, one membership."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from load_on import Load
from ray_cluster import PATIENCE_S, RayCluster, complete, processes
from redis_server import RedisServer, needs_redis

from router.ray_fleet import RayFleet

pytestmark = [
    pytest.mark.ray,
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.timeout(900, func_only=True),
    *needs_redis,
]
FLEET = "pair"


class Admin:
    """The admin API of one router."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=30, trust_env=False)
        self.url = url

    def swap(self, name: str) -> int:
        reply = self._http.put("/admin/strategy", json={"name": name})
        assert reply.status_code == 200, reply.text
        generation: int = reply.json()["generation"]
        return generation

    def active(self) -> tuple[str, int]:
        told = self._get("/admin/strategies")["active"]
        return told["name"], told["generation"]

    def engines(self) -> int:
        return len(self._get("/admin/engines")["engines"])

    def _get(self, path: str) -> dict[str, Any]:
        told: dict[str, Any] = self._http.get(path).json()
        return told


@pytest.fixture(scope="module")
def started(on: RayCluster) -> Iterator[str]:
    redis = RedisServer()
    try:
        yield on.run(
            "up", "mock", "--fleet", FLEET, "--engines", "2", "--routers", "2", "--store",
            redis.url, "--router-cpus", "0.5", "--port", "0", "--detach", "--step-ms", "10",
        )  # fmt: skip
    finally:
        RayFleet(on.ray, FLEET).down(lambda _: None)
        redis.close()


@pytest.fixture
def routers(on: RayCluster, started: str) -> list[Admin]:
    key = json.loads(on.run("status", "--fleet", FLEET, "--json"))["admin_key"]
    members = on.until_ready(2, 2, FLEET)
    return [Admin(members[name]["url"], key) for name in ("router-0", "router-1")]


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def test_both_are_told_and_answer(on: RayCluster, started: str, routers: list[Admin]):
    assert routers[0].url != routers[1].url
    for number, router in enumerate(routers):
        told = rf"^router-{number} ready {re.escape(router.url)} \(node "
        assert re.search(told, started, re.M), started
        assert complete(router.url) == 5
    assert "2 engines, 2 routers, 4 of 4 ready" in on.run("status", "--fleet", FLEET)
    until(lambda: [router.engines() for router in routers] == [2, 2])


def test_a_swap_through_one_is_one_of_both(routers: list[Admin]):
    first, second = routers
    with Load(first.url) as load, Load(second.url) as other:
        generation = first.swap("cache_aware")
        until(lambda: second.active() == ("cache_aware", generation))
        assert second.swap("data_parallel") == generation + 1
        until(lambda: first.active() == ("data_parallel", generation + 1))
        at = load.done, other.done
        until(lambda: load.done > at[0] + 20 and other.done > at[1] + 20)
    assert load.failures == other.failures == []


def test_a_router_that_comes_back_has_missed_no_swap(on: RayCluster, routers: list[Admin]):
    first, second = routers
    before = on.until_ready(2, 2, FLEET)["router-1"]
    with Load(first.url) as load:
        os.kill(before["pid"], signal.SIGKILL)
        generation = first.swap("cache_aware")
        on.until(lambda members: members["router-1"]["restarts"] > before["restarts"], FLEET)
        assert on.until_ready(2, 2, FLEET)["router-1"]["url"] == second.url
    assert load.failures == []
    assert second.active() == first.active() == ("cache_aware", generation)
    assert complete(second.url) == 5


def test_both_learn_of_engines_that_come_and_go(on: RayCluster, routers: list[Admin]):
    first, second = routers
    with Load(first.url) as load, Load(second.url) as other:
        for count in (3, 2):
            on.run("scale", "--fleet", FLEET, "--engines", str(count))
            on.until_ready(count, 2, FLEET)
            until(lambda wanted=count: first.engines() == second.engines() == wanted)
    assert load.failures == other.failures == []


def test_down_leaves_neither(on: RayCluster, started: str):
    assert f"fleet {FLEET} is gone" in on.run("down", "--fleet", FLEET)
    assert not processes("engine") | processes("router")
