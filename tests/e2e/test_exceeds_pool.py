"""Prompts that exceed the pool of the engine that should receive or send their KV."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from e2e_faults import Router, prompt_of
from engine_process import EngineProcess

pytestmark = [pytest.mark.processes, pytest.mark.slow]

NEW = 12


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineProcess]]:
    """One with room for everything, and one with a pool of 512 tokens that may borrow."""
    started = [
        EngineProcess("--pool-pages", "400", "--lend-share", "0.5", "--engine-id", "large"),
        EngineProcess(
            *("--pool-pages", "32", "--borrow", "--max-model-len", "4096", "--engine-id", "small")
        ),
    ]
    yield started
    for engine in started:
        engine.kill()


@pytest.fixture(scope="module")
def router(engines: list[EngineProcess]) -> Iterator[Router]:
    started = Router(engines)
    yield started
    started.kill()


@pytest.mark.parametrize(
    "strategy", ["prefill_decode", pytest.param("balanced", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize("small", ["prefill", "decode"])
def test_a_prompt_that_a_pool_cannot_hold_is_served_without_moving_its_kv(
    engines: list[EngineProcess], router: Router, strategy: str, small: str
):
    """It is computed where it is decoded; the receipt says why."""
    prompt = prompt_of(strategy + small, 700)
    large = "decode" if small == "prefill" else "prefill"
    with httpx.Client(base_url=router.url, timeout=60) as http:
        for engine, role in (("large", large), ("small", small)):
            http.patch(f"/admin/engines/{engine}", json={"role": role}).raise_for_status()
        http.put("/admin/strategy", json={"name": strategy}).raise_for_status()
        reply = http.post(
            "/v1/completions",
            headers={"X-Request-Id": strategy + small},
            json={
                "prompt": prompt,
                "max_tokens": NEW,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            },
        )
        assert reply.status_code == 200, reply.text
        receipt = http.get(f"/admin/requests/{strategy}{small}").json()
    assert "exceeds_pool" in receipt["fallbacks"]
    refused = ["remote_send"] if small == "prefill" else []  # the receiver is not asked at all
    assert [leg["call"] for leg in receipt["legs"] if leg["error"]] == refused
    assert receipt["legs"][-1]["engine"] == ("large" if small == "prefill" else "small")
    undisturbed = engines[0].generate(prompt, max_tokens=NEW)
    wanted = [token for event in undisturbed for token in event.get("token_ids", [])]
    assert reply.json()["choices"][0]["token_ids"] == wanted
    for engine in engines:
        engine.at_rest()
