"""`microserve up --backend vllm`: the built-in strategies over vLLM engines, faults included."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm_engines import EAGER, PYTHON, prompt, pytestmark

__all__ = ["pytestmark"]

START_S = 180
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


class Fleet:
    """Two vLLM engines of `tiny` and a router, by `up`."""

    def __init__(self, folder: Path) -> None:
        self.state_file = folder / "up.json"
        self.log = folder / "up.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    *(str(PYTHON), "-P", "-m", "router", "up", "tiny", "--backend", "vllm"),
                    *("--prefill", "1", "--decode", "1", "--port", "0", "--dtype", "float32"),
                    *("--pool-pages", "300", "--state-file", str(self.state_file), *EAGER),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=folder,
            )
        give_up = time.monotonic() + START_S
        while not self.state_file.exists():
            if time.monotonic() > give_up or self.process.poll() is not None:
                raise AssertionError(self.log.read_text())
            time.sleep(0.1)
        self.http = httpx.Client(base_url=self.state["router"]["url"], timeout=120, verify=False)

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.state_file.read_text())
        return state

    def use(self, name: str, params: dict[str, Any]) -> None:
        reply = self.http.put("/admin/strategy", json={"name": name, "params": params})
        assert reply.status_code == 200, reply.text

    def complete(self, ids: list[int], **fields: Any) -> dict[str, Any]:
        body = {"model": "tiny", "prompt": ids, "temperature": 0, "max_tokens": 24,
                "ignore_eos": True, "return_token_ids": True, **fields}  # fmt: skip
        reply = self.http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return {**answer, "request": reply.headers["x-request-id"]}

    def stream(self, ids: list[int], **fields: Any) -> Iterator[list[int]]:
        """Yield the token ids of each chunk. Fails for an error."""
        body = {"model": "tiny", "prompt": ids, "temperature": 0, "stream": True,
                "ignore_eos": True, "return_token_ids": True, **fields}  # fmt: skip
        with self.http.stream("POST", "/v1/completions", json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    for choice in event["choices"]:
                        yield choice.get("token_ids") or []

    def engines(self) -> dict[str, Any]:
        listed: list[dict[str, Any]] = self.http.get("/admin/engines").json()["engines"]
        return {engine["id"]: engine for engine in listed}

    def wait_up(self, within_s: float = START_S) -> None:
        give_up = time.monotonic() + within_s
        while [engine["status"] for engine in self.engines().values()] != ["up", "up"]:
            assert time.monotonic() < give_up, self.engines()
            time.sleep(0.2)

    def at_rest(self) -> None:
        give_up = time.monotonic() + 15
        while True:
            states = [engine["state"] for engine in self.engines().values()]
            rest = [
                not (state["running"] + state["waiting"] + state["puts_in_flight"])
                and state["pages"]["free"] + state["pages"]["cached"] == state["pages"]["total"]
                for state in states
            ]
            if all(rest):
                return
            assert time.monotonic() < give_up, states
            time.sleep(0.2)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(timeout=30)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"))
    try:
        yield fleet
    finally:
        fleet.stop()


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
