"""What an engine with `--borrow` accepts: lists of creditors, and contexts beyond its pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine_process import EngineProcess

from engine.protocol import BLOCK_TOKENS
from engine.protocol.lending import MAX_CREDITORS
from kvcache.attention import BLOCK

pytestmark = pytest.mark.processes

GOOD = {"instance": "c", "epoch": 1, "url": "http://127.0.0.1:1", "available": 8}
POOL = 64 * 16  # tokens


@pytest.fixture(scope="module")
def debtor() -> Iterator[EngineProcess]:
    engine = EngineProcess("--pool-pages", "64", "--borrow", "--max-model-len", "4096")
    yield engine
    engine.kill()


def test_the_protocol_has_the_block_of_the_attention():
    assert BLOCK_TOKENS == BLOCK


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "creditors"),
        ({"creditors": "c"}, "creditors"),
        ({"creditors": [GOOD], "more": 1}, "more"),
        ({"creditors": [GOOD] * (MAX_CREDITORS + 1)}, "creditors"),
        *(
            ({"creditors": [{**GOOD, key: wrong}]}, f"creditors.0.{key}")
            for key, wrong in (
                ("instance", ""),
                ("instance", "a\nb"),
                ("instance", "c" * 257),
                ("epoch", -1),
                ("epoch", "1"),
                ("available", -1),
                ("available", 2**31),
                ("url", ""),
                ("url", "ftp://h"),
                ("url", "http://"),
                ("url", "http://h?x"),
                ("url", "http://h/\n"),
                ("url", "http://" + "h" * 2048),
                ("surprise", 1),
            )
        ),
    ],
)
def test_bad_lists(debtor: EngineProcess, body: dict[str, Any], param: str):
    debtor.post("lend/creditors", creditors=[])
    reply = debtor.post("lend/creditors", **body)
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "bad_request", param)
    assert debtor.state()["borrowing"]["creditors"] == []


def test_a_list_replaces_the_one_before_and_leaves_itself_out(debtor: EngineProcess):
    own = debtor.state()["engine_id"]
    for names in (["c", "e"], ["e", own, "f"], []):
        rows = [{**GOOD, "instance": name} for name in names]
        assert debtor.post("lend/creditors", creditors=rows).json() == {"creditors": len(rows)}
        assert debtor.state()["borrowing"]["creditors"] == [each for each in names if each != own]


def test_an_engine_that_does_not_borrow_refuses_lists_and_contexts_beyond_its_pool():
    engine = EngineProcess("--pool-pages", "64", "--max-model-len", "4096")
    try:
        reply = engine.post("lend/creditors", creditors=[GOOD])
        assert reply.json()["error"]["type"] == "unsupported"
        assert engine.state()["borrowing"] is None and engine.state()["heartbeat"] is None
        assert engine.http.get("/microserving/model").json()["context_length"] == POOL
        with pytest.raises(RuntimeError, match="context_length_exceeded"):
            engine.generate([1] * POOL, max_tokens=1)
    finally:
        engine.kill()


def test_a_context_may_exceed_the_pool_of_an_engine_that_borrows(debtor: EngineProcess):
    assert debtor.http.get("/microserving/model").json()["context_length"] == 4096
    with pytest.raises(RuntimeError, match="context_length_exceeded"):
        debtor.generate([1] * 4000, max_tokens=97)
    with pytest.raises(RuntimeError, match="context_length_exceeded"):
        debtor.generate([1] * 4097, max_tokens=1)
    heartbeat = debtor.state()["heartbeat"]
    assert (heartbeat["available"], heartbeat["borrowed"]) == (0, {})


def test_without_a_wanted_length_the_pool_limits_contexts_as_ever():
    engine = EngineProcess("--pool-pages", "64", "--borrow")
    try:
        assert engine.http.get("/microserving/model").json()["context_length"] == POOL
    finally:
        engine.kill()
