"""Every strategy in docs/strategies.md, loaded from the page's text, on real engines."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_process import RouterProcess

PAGE = (Path(__file__).parents[3] / "docs" / "strategies.md").read_text()
NAME = re.compile(r"@strategy\nasync def (\w+)")
EXAMPLES = {
    NAME.search(block)[1]: block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S)
}
NEW = 24
salts = itertools.count(1)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def router(real_engines: list[str]) -> Iterator[RouterProcess]:
    router = RouterProcess(real_engines, "data_parallel", "--allow-upload")
    for price, engine in enumerate(("engine-0", "engine-1")):
        body = {"labels": {"price": str(price)}}
        router.http.patch(f"/admin/engines/{engine}", json=body).raise_for_status()
    yield router
    router.kill()


def prompt(length: int) -> list[int]:
    """Return a prompt that is in no cache."""
    salt = next(salts)
    return [(salt * 37 + 7 * i * i + 3 * i) % 500 + 1 for i in range(length)]


def wanted(engine: str, tokens: list[int]) -> list[int]:
    """Return the tokens of one engine without a router."""
    body = {
        "request_id": f"page-{next(salts)}", "prompt": tokens, "temperature": 0.0,
        "max_tokens": NEW, "ignore_eos": True,
    }  # fmt: skip
    reply = httpx.post(f"{engine}/microserving/start_generate", json=body, timeout=30)
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line]
    return [token for event in events for token in event["token_ids"]]


def load(router: RouterProcess, name: str, **params: Any) -> None:
    body = {"source": EXAMPLES[name], "file": f"{name}.py"}
    reply = router.http.post("/admin/strategies", json=body)
    assert reply.status_code == 201, reply.text
    router.use(name, **params)


def legs(router: RouterProcess, tokens: list[int], **headers: str) -> list[tuple[str, str]]:
    """Return the calls that a request makes, each with its engine."""
    body = {"prompt": tokens, "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    reply = router.http.post("/v1/completions", json=body, headers=headers)
    assert reply.status_code == 200, reply.text
    receipt = router.http.get(f"/admin/requests/{reply.headers['X-Request-Id']}").json()
    return [(leg["call"], leg["engine"]) for leg in receipt["legs"]]


def test_the_page_has_nine_examples_and_an_introduction():
    assert len(EXAMPLES) == 10


@pytest.mark.processes
@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_gives_the_tokens_of_one_engine(router, real_engines, name):
    load(router, name)
    for length in (1, 17, 90, 400):
        tokens = prompt(length)
        got = [router.tokens(tokens, NEW) for _ in ("cold", "warm")]
        assert got[0] == got[1] == wanted(real_engines[1], tokens)
        assert length == 1 or len(set(got[0])) > 5
    assert router.strategies()["active"]["offences"] == {}


@pytest.mark.processes
def test_long_prompts_are_disaggregated_and_short_ones_are_not(router):
    load(router, "long_prompts", threshold=64)
    assert [call for call, _ in legs(router, prompt(40))] == ["start_generate"]
    long = prompt(300)
    assert "remote_send" in [call for call, _ in legs(router, long)]


@pytest.mark.processes
def test_a_session_stays_on_its_engine_and_sessions_are_spread(router):
    load(router, "sticky")
    homes = {}
    for session in map(str, range(8)):
        where = {legs(router, prompt(20), **{"X-Session-ID": session})[0] for _ in range(3)}
        (homes[session],) = where
    assert len(set(homes.values())) == 2


@pytest.mark.processes
def test_a_hedge_asks_both_and_gives_one_answer(router, real_engines):
    load(router, "hedged", after_ms=0)
    tokens = prompt(300)
    assert router.tokens(tokens, NEW) == wanted(real_engines[0], tokens)
    asked = legs(router, prompt(300))
    assert sorted(asked) == [("start_generate", "engine-0"), ("start_generate", "engine-1")]
    load(router, "hedged", after_ms=60_000)
    assert len(legs(router, prompt(20))) == 1


@pytest.mark.processes
def test_price_classes_prefer_the_cheapest(router):
    load(router, "price_classes")
    assert {legs(router, prompt(20))[0][1] for _ in range(3)} == {"engine-0"}
    router.use("price_classes", capacity=0)  # every engine is busy: the cheapest is chosen
    assert legs(router, prompt(20))[0][1] == "engine-0"


@pytest.mark.processes
def test_a_replica_is_in_another_zone(router):
    load(router, "other_zone", label="price")
    body = {"prompt": prompt(40), "max_tokens": NEW, "temperature": 0, "ignore_eos": True}
    reply = router.http.post("/v1/completions", json=body)
    receipt = router.http.get(f"/admin/requests/{reply.headers['X-Request-Id']}").json()
    (leg,) = receipt["legs"]
    assert {leg["engine"], leg["replica"]} == {"engine-0", "engine-1"}
    assert leg["landed"] >= 40 and receipt["fallbacks"] == []


@pytest.mark.processes
def test_a_prefix_is_pinned_once_and_found(router, real_engines):
    def pinned() -> int:
        states = [httpx.get(f"{url}/microserving/state").json() for url in real_engines]
        return sum(state["pages"]["pinned"] * state["page_size"] for state in states)

    load(router, "pin_prefix", length=64)
    system, before = prompt(64), pinned()
    first = legs(router, system + prompt(30))
    assert [call for call, _ in first] == ["start_generate", "pin"]
    assert legs(router, system + prompt(30)) == [first[0]]
    assert pinned() == before + 64


@pytest.mark.processes
def test_what_serves_a_request_depends_on_its_priority_and_on_the_last_prompts(router):
    def served(tokens: list[int], **fields: Any) -> list[str]:
        body = {"prompt": tokens, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, **fields}
        reply = router.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return router.http.get(f"/admin/requests/{reply.headers['X-Request-Id']}").json()[
            "delegates"
        ]

    load(router, "by_traffic", long=40)
    assert served(prompt(30)) == ["cache_aware"]
    assert served(prompt(30), priority=-1) == ["replicate"]
    assert served(prompt(900)) == ["balanced"]
    router.use("by_traffic", long=1000)  # a revision remembers nothing of the one before
    assert served(prompt(900)) == ["cache_aware"]
