"""Disaggregation over several engines of each role: real processes without a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from engine_process import EngineProcess
from router_process import RouterProcess

NEW = 3
NAMES = ("e0", "e1", "e2", "e3")
salts = itertools.count(1)
pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture(scope="module")
def mocks() -> Iterator[list[EngineProcess]]:
    engines = [
        EngineProcess(
            *("--engine-id", name, "--step-ms", "1", "--prefill-tokens-per-ms", "4"), model="mock"
        )
        for name in NAMES
    ]
    yield engines
    for engine in engines:
        engine.stop()
        engine.kill()


@pytest.fixture(scope="module")
def router(mocks) -> Iterator[RouterProcess]:
    router = RouterProcess([engine.url for engine in mocks], "data_parallel")
    yield router
    router.kill()


def give(router: RouterProcess, roles: dict[str, str]) -> None:
    """Assign roles; drain the engines without one."""
    for name in NAMES:
        change = {"role": roles.get(name, "any"), "draining": name not in roles}
        router.http.patch(f"/admin/engines/{name}", json=change).raise_for_status()


def legs(router: RouterProcess, length: int, new: int = NEW) -> list[dict[str, Any]]:
    salt = next(salts)
    reply = router.ask([(salt * 37 + 7 * i) % 500 + 1 for i in range(length)], new)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["choices"][0]["token_ids"]) == new
    receipt = router.http.get(f"/admin/requests/{reply.headers['X-Request-Id']}").json()
    assert not receipt["retries"]
    return receipt["legs"]


@pytest.mark.parametrize(
    ("strategy", "params"),
    [("prefill_decode", {}), ("balanced", {"ratio": 0.2}), ("balanced", {"ratio": "auto"})],
)
@pytest.mark.parametrize(
    ("prefills", "decodes"),
    [
        pytest.param(1, 1, marks=pytest.mark.thorough),
        (1, 2),
        pytest.param(2, 1, marks=pytest.mark.thorough),
        (2, 2),
    ],
)
def test_engines_of_each_role_share_its_work(router, strategy, params, prefills, decodes):
    names = iter(NAMES)
    p = set(itertools.islice(names, prefills))
    d = set(itertools.islice(names, decodes))
    give(router, dict.fromkeys(p, "prefill") | dict.fromkeys(d, "decode"))
    router.use(strategy, **params)
    with ThreadPoolExecutor(8) as pool:
        asked = list(pool.map(lambda length: legs(router, length), [64] * 16))
    where: dict[str, set[str]] = {}
    for calls in asked:
        by_call = {leg["call"]: leg for leg in calls}
        assert by_call["prep_recv"]["engine"] == by_call["start_generate"]["engine"]
        for call, leg in by_call.items():
            where.setdefault(call, set()).add(leg["engine"])
    assert where == {"prep_recv": d, "remote_send": p, "start_generate": d}


@pytest.mark.parametrize("strategy", ["prefill_decode", "balanced"])
def test_roles_are_hints(router, strategy):
    """Engines with one role, or none, share the work; no engine sends to itself."""
    router.use(strategy)
    for role in ("any", "prefill", "decode"):
        give(router, dict.fromkeys(NAMES, role))
        engines = set()
        for _ in range(8):
            where = {leg["call"]: leg["engine"] for leg in legs(router, 64)}
            assert where["remote_send"] != where["start_generate"]
            engines.update(where.values())
        assert engines == set(NAMES)


def test_auto_spares_engines_with_streams(router):
    """A prompt takes 100 ms; decoding takes 2 ms, then 600."""
    give(router, {"e0": "prefill", "e1": "decode"})

    def share(length: int, new: int) -> float:
        (generation,) = (
            leg for leg in legs(router, length, new) if leg["call"] == "start_generate"
        )
        return (generation["end"] - generation["begin"]) / length

    router.use("balanced", ratio="auto")
    assert share(400, 2) == pytest.approx(0.1)  # no measurement yet
    assert share(400, 2) > 0.5
    router.use("balanced", ratio="auto")  # another generation begins with its own state
    assert share(400, 600) == pytest.approx(0.1)
    assert share(400, 600) < 0.1
    for _ in range(60):  # old measurements are forgotten, however long each of these takes
        if share(400, 2) > 0.3:
            break
    else:
        pytest.fail("the measurements of long generations are not forgotten")
