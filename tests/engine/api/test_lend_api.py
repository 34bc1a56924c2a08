"""The calls about lent pages of a real engine process, with debtors that come and go."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from engine_process import EngineProcess

from kvcache.lease import KVAddress

pytestmark = pytest.mark.processes

PROMPT = [(7 * n) % 250 for n in range(40)]
PAGES, CAP, LEASE_MS = 40, 20, 600_000
SHORT_MS = 1500
FLAGS = ("--pool-pages", str(PAGES), "--lend-share", "0.5", "--engine-id", "creditor")
# A debtor that borrows three pages and renews the loan until it is killed. It says so once it has
# kept one loan for longer than it would last without renewals.
DEBTOR = """
import http.client, itertools, json, sys, time
host, port, epoch, lease_s = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
def post(call, **body):
    connection = http.client.HTTPConnection(host, port, timeout=10)
    body = {"debtor": "mortal", "epoch": 1, "creditor_epoch": epoch, **body}
    connection.request("POST", "/microserving/lend/" + call, json.dumps(body))
    return json.loads(connection.getresponse().read())
for name in map(str, itertools.count()):
    assert post("allocate", lease_id=name, size=3)["granted"]
    began, said = time.monotonic(), False
    while post("renew", lease_ids=[name])["renewed"]:
        if not said and time.monotonic() > began + 1.3 * lease_s:
            said = print("renewed", flush=True) is None
        time.sleep(0.1)
"""


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    engine = EngineProcess(*FLAGS, "--lease-ms", str(LEASE_MS))
    yield engine
    engine.kill()


@pytest.fixture(scope="module")
def short() -> Iterator[EngineProcess]:
    """A creditor whose loans end soon."""
    engine = EngineProcess(*FLAGS, "--lease-ms", str(SHORT_MS))
    yield engine
    engine.kill()


@pytest.fixture
def creditor(process: EngineProcess) -> Iterator[EngineProcess]:
    """The shared process; after each test nothing is lent, and nothing is leaked."""
    yield process
    process.at_rest()


def call(engine: EngineProcess, name: str, **fields: Any) -> httpx.Response:
    values = {"debtor": "d", "epoch": 1, "creditor_epoch": engine.state()["epoch"], **fields}
    return engine.post(f"lend/{name}", **values)


def ask(engine: EngineProcess, lease_id: str, size: int, **fields: Any) -> dict[str, Any]:
    reply = call(engine, "allocate", lease_id=lease_id, size=size, **fields)
    assert reply.status_code == 200, reply.text
    return reply.json()


def free(engine: EngineProcess, lease_id: str, **fields: Any) -> dict[str, Any]:
    return call(engine, "free", lease_id=lease_id, **fields).json()


def test_pages_are_lent_up_to_the_cap_and_repeated_calls_get_the_same_answer(
    creditor: EngineProcess,
):
    first = ask(creditor, "a1", 12)
    assert first["granted"] and first["lease_ms"] == LEASE_MS and first["endpoints"]
    address = KVAddress.verify(first["kv_addr"], b"secret")
    assert address.engine_id == "creditor" and len(set(address.pages())) == 12
    assert creditor.state()["pages"]["lent"] == 12
    assert ask(creditor, "a1", 12) == first
    refused = {"granted": False, "kv_addr": None, "lease_ms": LEASE_MS, "endpoints": []}
    assert ask(creditor, "a2", CAP - 11) == ask(creditor, "a2", CAP - 11) == refused
    assert creditor.state()["pages"]["lent"] == 12
    part = free(creditor, "a1", pages=address.pages()[:4])
    assert part["freed_pages"] == 4
    assert KVAddress.verify(part["kv_addr"], b"secret").pages() == address.pages()[4:]
    assert free(creditor, "a1") == {"freed_pages": 8, "kv_addr": None}
    assert free(creditor, "a1") == {"freed_pages": 0, "kv_addr": None}
    gone = call(creditor, "allocate", lease_id="a1", size=12)
    assert (gone.status_code, gone.json()["error"]["type"]) == (410, "lease_expired")


def test_metrics_and_the_heartbeat_show_what_is_lent(creditor: EngineProcess):
    ask(creditor, "m1", 5)
    text = creditor.http.get("/metrics").text
    assert 'microserve:pages_lent{model_name="tiny"} 5.0' in text
    assert 'microserve:loans{model_name="tiny"} 1.0' in text
    state = creditor.state()
    heartbeat = state["heartbeat"]
    assert (heartbeat["instance"], heartbeat["epoch"]) == ("creditor", state["epoch"])
    assert (heartbeat["available"], heartbeat["lent"]) == (CAP - 5, {"d": 5})
    assert creditor.state()["heartbeat"]["sequence"] > heartbeat["sequence"]
    free(creditor, "m1")


GOOD: dict[str, dict[str, Any]] = {
    "allocate": {"debtor": "d", "epoch": 1, "creditor_epoch": 1, "lease_id": "x", "size": 1},
    "free": {"debtor": "d", "epoch": 1, "creditor_epoch": 1, "lease_id": "x"},
    "renew": {"debtor": "d", "epoch": 1, "creditor_epoch": 1, "lease_ids": ["x"]},
}


@pytest.mark.parametrize(
    ("name", "fields", "param"),
    [
        *(
            (name, {key: wrong}, key)
            for name in GOOD
            for key, wrong in (
                ("debtor", ""),
                ("debtor", "d" * 257),
                ("debtor", "a\nb"),
                ("debtor", 1),
                ("epoch", -1),
                ("epoch", 2**63),
                ("epoch", "1"),
                ("creditor_epoch", 1.5),
                ("surprise", 1),
            )
        ),
        ("allocate", {"size": 0}, "size"),
        ("allocate", {"size": 2**31}, "size"),
        ("allocate", {"size": None}, "size"),
        ("allocate", {"lease_id": ""}, "lease_id"),
        ("allocate", {"lease_id": "x" * 257}, "lease_id"),
        ("free", {"pages": [0]}, "pages.0"),
        ("free", {"pages": [2**31]}, "pages.0"),
        ("free", {"pages": "all"}, "pages"),
        ("renew", {"lease_ids": "x"}, "lease_ids"),
        ("renew", {"lease_ids": [""]}, "lease_ids.0"),
        ("renew", {"lease_ids": ["x"] * 1025}, "lease_ids"),
    ],
)
def test_bad_messages(process: EngineProcess, name: str, fields: dict[str, Any], param: str):
    reply = process.post(f"lend/{name}", **{**GOOD[name], **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["type"], error["param"]) == (400, "bad_request", param)


@pytest.mark.parametrize("name", list(GOOD))
def test_messages_for_another_process_are_refused(process: EngineProcess, name: str):
    reply = process.post(f"lend/{name}", **GOOD[name])
    assert (reply.status_code, reply.json()["error"]["type"]) == (409, "stale_epoch")


def test_an_engine_lends_nothing_to_itself_and_nothing_to_a_past_process(creditor: EngineProcess):
    reply = call(creditor, "allocate", debtor="creditor", lease_id="1", size=1)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "debtor")
    assert ask(creditor, "1", 1, debtor="e", epoch=1)["granted"]
    assert ask(creditor, "1", 1, debtor="e", epoch=2)["granted"]
    assert creditor.state()["pages"]["lent"] == 1  # the loan of the earlier process has ended
    reply = call(creditor, "renew", debtor="e", epoch=1, lease_ids=["1"])
    assert (reply.status_code, reply.json()["error"]["type"]) == (409, "stale_epoch")
    free(creditor, "1", debtor="e", epoch=2)


def test_a_killed_debtor_s_pages_come_back(short: EngineProcess):
    url, epoch = httpx.URL(short.url), short.state()["epoch"]
    where = url.host, str(url.port), str(epoch), str(SHORT_MS / 1000)
    with subprocess.Popen(
        [sys.executable, "-c", DEBTOR, *where], stdout=subprocess.PIPE, text=True
    ) as debtor:
        try:
            assert debtor.stdout is not None and debtor.stdout.readline() == "renewed\n"
        finally:
            debtor.kill()
    assert short.at_rest()["pages"]["lent"] == 0


def test_a_generation_calls_loans_back_and_has_the_same_tokens(short: EngineProcess):
    def tokens() -> list[int]:
        found = short.generate(PROMPT, max_tokens=300)
        assert "error" not in found[-1], found[-1]
        return [token for event in found for token in event["token_ids"]]

    expected = tokens()
    assert ask(short, "g1", CAP)["granted"]
    assert tokens() == expected  # nobody frees the loan: it ends at its deadline
    assert call(short, "renew", lease_ids=["g1"]).json()["ended"] == ["g1"]
    short.at_rest()


def test_the_address_of_a_loan_lets_another_engine_write_into_it(
    creditor: EngineProcess, engine_process: EngineProcess
):
    """A mirror stands for what will write there."""
    address = ask(creditor, "w1", 4)["kv_addr"]

    def mirrored(kv_addr: str) -> dict[str, Any]:
        last = engine_process.generate(
            PROMPT, max_tokens=20, mirror={"kv_addr": kv_addr, "every": 1}
        )[-1]
        assert last["finish_reason"] == "length"
        return last["mirror"]

    landed = mirrored(address)
    assert landed["landed"] > len(PROMPT) and "stopped" not in landed
    free(creditor, "w1")
    assert mirrored(address)["stopped"] == "lease_expired"
    with pytest.raises(RuntimeError, match="bad_address"):
        mirrored(address[:-4] + "AAAA")


def test_a_restarted_creditor_refuses_messages_for_the_process_before_it():
    engine = EngineProcess(*FLAGS)
    epoch = engine.state()["epoch"]
    assert ask(engine, "1", 2)["granted"]
    engine.kill()
    again = EngineProcess(*FLAGS, port=engine.port)
    try:
        assert again.state()["epoch"] > epoch
        for name, fields in (
            ("allocate", {"lease_id": "1", "size": 2}),
            ("free", {"lease_id": "1"}),
            ("renew", {"lease_ids": ["1"]}),
        ):
            reply = call(again, name, creditor_epoch=epoch, **fields)
            assert (reply.status_code, reply.json()["error"]["type"]) == (409, "stale_epoch")
        again.at_rest()
    finally:
        again.kill()


def test_the_calls_need_the_engine_s_key():
    engine = EngineProcess("--api-key", "k", model="mock")
    try:
        for name, body in GOOD.items():
            assert engine.post(f"lend/{name}", **body).status_code == 401
    finally:
        engine.kill()
