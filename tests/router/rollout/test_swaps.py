"""A thousand swaps under load, in a real router with real engines: no token is lost, repeated or
out of order, and every generation ends."""

from __future__ import annotations

import itertools
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from router_process import RouterProcess, until

pytestmark = pytest.mark.processes

SWAPS, NEW, CLIENTS = 1000, 32, 4
STRATEGIES = [
    ("data_parallel", {}), ("prefill_decode", {}), ("balanced", {"ratio": 0.5}),
    ("balanced", {"ratio": 1.0}),
]  # fmt: skip


def stream(http: httpx.Client, prompt: list[int]) -> list[int]:
    """Return the tokens of a streamed answer, in order of arrival."""
    body = {
        "prompt": prompt, "max_tokens": NEW, "temperature": 0, "ignore_eos": True, "stream": True,
        "return_token_ids": True,
    }  # fmt: skip
    tokens: list[int] = []
    with http.stream("POST", "/v1/completions", json=body) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            tokens += choice["token_ids"]
    return tokens


@pytest.mark.slow
def test_a_thousand_swaps_lose_no_token(real_engines):
    router = RouterProcess(real_engines, "data_parallel", "--max-receipts", "100000")
    try:
        source = random.Random(5)
        prompts = [[source.randrange(1, 500) for _ in range(60 + 20 * i)] for i in range(CLIENTS)]
        wanted = [stream(router.http, prompt) for prompt in prompts]
        assert all(len(tokens) == NEW for tokens in wanted)
        swapped = threading.Event()

        def client(number: int) -> int:
            rounds = 0
            while not swapped.is_set():
                assert stream(router.http, prompts[number]) == wanted[number]
                rounds += 1
            return rounds

        def swap() -> None:
            try:
                for number, (name, params) in zip(
                    range(SWAPS), itertools.cycle(STRATEGIES), strict=False
                ):
                    assert router.use(name, **params) == number + 2
            finally:
                swapped.set()

        with ThreadPoolExecutor(CLIENTS + 1) as pool:
            clients = [pool.submit(client, number) for number in range(CLIENTS)]
            pool.submit(swap).result()
            rounds = [done.result() for done in clients]
        assert min(rounds) >= 1
        # A client has the end of its stream before its generation is left.
        state = until(
            lambda: (
                (s := router.strategies())["active"]["in_flight"] == 0
                and len(s["generations"]) == 1
                and s
            )
        )
        assert state["active"]["generation"] == SWAPS + 1
        entries = router.http.get("/admin/audit").json()["entries"]
        assert [entry["generation"] for entry in entries[-3:]] == [SWAPS - 1, SWAPS, SWAPS + 1]
        print(f"{sum(rounds)} streams during {SWAPS} swaps")
    finally:
        router.kill()
