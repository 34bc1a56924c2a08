"""One of this project's engines, two of vLLM's and one OpenAI server, behind one router."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_process import EngineClient, EngineProcess
from forked import ForkedProcess, run_microserve
from vllm_engines import VllmProcess, prompt, pytestmark, running

__all__ = ["pytestmark"]

SECRET = "5a" * 32


class Router(ForkedProcess):
    """`microserve router` with an admin API."""

    def __init__(self, engines: list[str], strategy: str, *flags: str) -> None:
        urls = [part for url in engines for part in ("--engine", url)]
        super().__init__(
            run_microserve, "router", *urls, "--strategy", strategy, "--port", "0", *flags
        )
        self.http = httpx.Client(base_url=self.line().split()[-1], timeout=60, verify=False)

    def ask(self, ids: list[int], tokens: int = 16) -> dict[str, Any]:
        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        receipt = self.http.get(f"/admin/requests/{reply.headers['x-request-id']}").json()
        return {"ids": answer["choices"][0]["token_ids"], "receipt": receipt}

    def engines(self) -> dict[str, dict[str, Any]]:
        listed: list[dict[str, Any]] = self.http.get("/admin/engines").json()["engines"]
        return {engine["id"]: engine for engine in listed}

    def kill(self) -> None:
        self.http.close()
        super().kill()


def until_up(router: Router) -> None:
    give_up = time.monotonic() + 30
    while {each["status"] for each in router.engines().values()} != {"up"}:
        assert time.monotonic() < give_up, router.engines()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[EngineClient]]:
    """One of ours, and two of vLLM's."""
    ours = EngineProcess(
        "--dtype", "float32", "--engine-id", "ours", "--pool-pages", "512", secret=SECRET
    )
    vllm = [
        VllmProcess("--engine-id", f"v{number}", cpu=str(number), secret=SECRET)
        for number in range(2)
    ]
    try:
        with running(*vllm):
            yield [ours, *vllm]
    finally:
        ours.kill()


STRATEGIES = ("prefill_decode", "balanced", "cache_aware", "replicate")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kv_moves_among_vllm_engines_only(engines: list[EngineClient], strategy: str):
    ours, first = engines[0], 9000 + 100 * STRATEGIES.index(strategy)
    router = Router([engine.url for engine in engines], strategy)
    try:
        until_up(router)
        listed = router.engines()
        assert listed["v0"]["kv"] == listed["v1"]["kv"] != listed["ours"]["kv"]
        assert "mirror" in listed["ours"]["capabilities"]
        assert "mirror" not in listed["v0"]["capabilities"]
        kinds = set()
        for seed in range(first, first + 9):
            found = router.ask(prompt(120, seed))
            alone = ours.generate(prompt(120, seed), max_tokens=16)
            assert found["ids"] == [t for event in alone for t in event["token_ids"]]
            legs = found["receipt"]["legs"]
            (decode,) = [leg["engine"] for leg in legs if leg["call"] == "start_generate"]
            senders = [leg["engine"] for leg in legs if leg["call"] == "remote_send"]
            assert all((each == "ours") == (decode == "ours") for each in senders)
            kinds.add(decode == "ours")
            assert not found["receipt"]["retries"]
        assert kinds == {True, False}
        for engine in engines:
            engine.at_rest()
    finally:
        router.kill()
