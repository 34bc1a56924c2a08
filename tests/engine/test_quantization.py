"""An engine with int8 weights serves like any other and exchanges no KV with others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_process import EngineProcess

pytestmark = pytest.mark.processes

PROMPT = [(7 * n) % 250 for n in range(40)]
FLAGS = ("--dtype", "bfloat16", "--pool-pages", "50")


@pytest.fixture
def int8() -> Iterator[EngineProcess]:
    process = EngineProcess(*FLAGS, "--quantization", "int8")
    yield process
    process.kill()


@pytest.fixture
def bfloat16() -> Iterator[EngineProcess]:
    process = EngineProcess(*FLAGS)
    yield process
    process.kill()


@pytest.mark.slow
def test_an_int8_engine_generates_and_refuses_kv_of_other_weights(
    int8: EngineProcess, bfloat16: EngineProcess
):
    ours, others = ([*process.generate(PROMPT, max_tokens=8)] for process in (int8, bfloat16))
    for events in (ours, others):
        assert sum(len(event["token_ids"]) for event in events) == 8
    for name, sender, receiver in (("a", int8, bfloat16), ("b", bfloat16, int8)):
        lease = receiver.post("prep_recv", request_id=name, prompt=PROMPT, end=39).json()
        send = {"prompt": PROMPT, "begin": lease["match_len"], "end": 39}
        reply = sender.post("remote_send", request_id=name, kv_addr=lease["kv_addr"], **send)
        assert reply.json()["error"]["type"] == "bad_address"
        assert "other weights" in reply.json()["error"]["message"]
        receiver.post("release", request_id=name)
        receiver.at_rest()
