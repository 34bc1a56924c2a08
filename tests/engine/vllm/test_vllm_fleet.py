"""`microserve up --backend vllm`: the built-in strategies over vLLM engines, faults included."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm_engines import prompt, pytestmark
from vllm_fleets import START_S, Fleet, running_fleet

__all__ = ["pytestmark"]

STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("data_parallel", {}),
    ("prefill_decode", {}),
    ("balanced", {"ratio": 0.3}),
    ("balanced", {"ratio": "auto"}),
    ("cache_aware", {}),
    ("migrate", {"overload": 0}),
    ("replicate", {"every": 16}),
    ("adaptive", {}),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def at_rest(fleet: Fleet) -> Iterator[None]:
    yield
    fleet.wait_up()
    fleet.at_rest()


def ids_of(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize(("name", "params"), STRATEGIES, ids=lambda value: str(value))
def test_each_strategy_gives_the_tokens_of_one_engine(
    fleet: Fleet, name: str, params: dict[str, Any]
):
    number = STRATEGIES.index((name, params))
    prompts = [prompt(40 + 55 * n, 7000 + 10 * number + n) for n in range(4)]
    fleet.use(name, params)
    found = [ids_of(fleet.complete(ids)) for ids in prompts]
    again = [ids_of(fleet.complete(ids)) for ids in prompts]  # warm
    fleet.use("data_parallel", {})
    wanted = [ids_of(fleet.complete(ids)) for ids in prompts]
    assert found == again == wanted
    assert all(len(set(ids)) > 8 for ids in wanted)


def test_a_prompt_really_moves_between_the_engines(fleet: Fleet):
    fleet.use("prefill_decode", {})
    answer = fleet.complete(prompt(150, 7500))
    receipt = fleet.http.get(f"/admin/requests/{answer['request']}").json()
    assert [leg["call"] for leg in receipt["legs"]] == [
        "prep_recv",
        "remote_send",
        "start_generate",
    ]
    assert receipt["fallbacks"] == []


@pytest.mark.parametrize("name", ["data_parallel", "prefill_decode"])
def test_a_grammar_that_vllm_refuses_is_the_client_s_mistake(fleet: Fleet, name: str):
    fleet.use(name, {})
    reply = fleet.http.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": prompt(90, 7550), "structured_outputs": {"regex": "["}},
    )
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "structured_outputs"


def test_a_swap_of_strategies_leaves_streams_alone(fleet: Fleet):
    ids = prompt(100, 7600)
    fleet.use("prefill_decode", {})
    stream = fleet.stream(ids, max_tokens=150)
    found = next(stream) + next(stream)
    fleet.use("data_parallel", {})
    for chunk in stream:
        found += chunk
    assert found == ids_of(fleet.complete(ids, max_tokens=150))


def test_a_drained_engine_s_stream_goes_on_elsewhere(fleet: Fleet):
    ids = prompt(100, 7700)
    fleet.use("data_parallel", {})
    wanted = ids_of(fleet.complete(ids, max_tokens=300))
    stream = fleet.stream(ids, max_tokens=300)
    found = next(stream) + next(stream)
    (busy,) = [name for name, engine in fleet.engines().items() if engine["load"]["streams"] == 1]
    fleet.http.patch(f"/admin/engines/{busy}", json={"draining": True})
    try:
        for chunk in stream:
            found += chunk
    finally:
        fleet.http.patch(f"/admin/engines/{busy}", json={"draining": False})
    assert found == wanted


def test_streams_outlive_an_engine(fleet: Fleet):
    """SIGKILL of each engine under eight streams: greedy output goes on with the same tokens."""
    for number, role in enumerate(("prefill", "decode")):
        fleet.use("prefill_decode", {})
        prompts = [prompt(80 + 30 * n, 7800 + 10 * number + n) for n in range(8)]
        wanted = [ids_of(fleet.complete(ids, max_tokens=120)) for ids in prompts]
        found: dict[int, list[int]] = {}

        def one(
            n: int, prompts: list[list[int]] = prompts, found: dict[int, list[int]] = found
        ) -> None:
            found[n] = [token for chunk in fleet.stream(prompts[n], max_tokens=120)
                        for token in chunk]  # fmt: skip

        threads = [threading.Thread(target=one, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.4)
        (victim,) = [each for each in fleet.state["engines"] if each["role"] == role]
        epoch = fleet.engines()[victim["id"]]["epoch"]
        os.kill(victim["pid"], signal.SIGKILL)
        for thread in threads:
            thread.join(timeout=120)
        assert [found.get(n) for n in range(8)] == wanted
        give_up = time.monotonic() + START_S
        while fleet.engines().get(victim["id"], {}).get("epoch") in (None, epoch):
            assert time.monotonic() < give_up
            time.sleep(0.2)
        fleet.wait_up()
