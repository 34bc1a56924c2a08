"""Two vLLM engines that exchange KV give the tokens of one that computes alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest
from vllm_engines import (
    BLOCK,
    VllmProcess,
    compiles,
    prompt,
    pytestmark,
    running,
    send,
    tokens,
    unique,
)

from engine.protocol import page_names

__all__ = ["pytestmark"]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[VllmProcess]]:
    with running(VllmProcess(cpu="0"), VllmProcess(cpu="1")) as engines:
        yield engines


@pytest.fixture(autouse=True)
def at_rest(pair: list[VllmProcess]) -> Iterator[None]:
    yield
    for engine in pair:
        engine.at_rest()


@pytest.mark.parametrize("end", sorted({*range(0, 100, 9), 31, 32, 33, 64, 98}))
def test_every_end_of_a_prompt_cold(pair: list[VllmProcess], end: int):
    sender, receiver = pair
    ids = prompt(100, 1000 + end)
    request_id, lease_id, sent = send(sender, receiver, ids, end)
    if end:
        assert sent["sent_tokens"] == sent["computed_tokens"] == end
        assert sent["cached_tokens"] == 0
    got = receiver.generate(ids, begin=end, lease_id=lease_id, request_id=request_id)
    assert got[0]["begin"] == end
    assert tokens(got) == sender.tokens(ids)


@pytest.mark.parametrize("end", [33, 64, 90, 127])
@pytest.mark.parametrize("warm", ["sender", "receiver", "both"])
def test_a_prompt_that_is_cached_in_part(pair: list[VllmProcess], end: int, warm: str):
    sender, receiver = pair
    ids = prompt(128, 2000 + end + len(warm) * 1000)
    if warm != "receiver":
        sender.tokens(ids[:70])
    if warm != "sender":
        receiver.tokens(ids[:40])
    request_id, lease_id, sent = send(sender, receiver, ids, end)
    if warm == "sender":
        assert sent["cached_tokens"] == min(end // BLOCK, 2) * BLOCK
    elif sent:
        assert sent["sent_tokens"] == end - BLOCK  # the receiver had a block of it
    got = receiver.generate(ids, begin=end, lease_id=lease_id, request_id=request_id)
    assert tokens(got) == sender.tokens(ids)


def test_a_prompt_that_is_cached_whole_is_put_without_a_step(pair: list[VllmProcess]):
    sender, receiver = pair
    ids = prompt(4 * BLOCK, 3000)
    wanted = sender.tokens(ids)
    request_id, lease_id, sent = send(sender, receiver, ids, 4 * BLOCK)
    assert (sent["cached_tokens"], sent["computed_tokens"]) == (4 * BLOCK, 0)
    got = receiver.generate(ids, lease_id=lease_id, request_id=request_id)
    assert tokens(got) == wanted


def test_commit_makes_the_next_request_find_the_prefix(pair: list[VllmProcess]):
    sender, receiver = pair
    ids = prompt(3 * BLOCK + 7, 3100)
    _, lease_id, _ = send(sender, receiver, ids, 3 * BLOCK + 5)
    committed = receiver.post("commit", lease_id=lease_id).json()
    assert committed == {"committed_tokens": 3 * BLOCK}
    assert receiver.post("commit", lease_id=lease_id).json() == committed
    got = receiver.generate(ids)
    assert got[-1]["usage"]["cached_tokens"] == 3 * BLOCK
    assert tokens(got) == sender.tokens(ids)


def test_a_second_sender_goes_on_from_the_watermark(pair: list[VllmProcess]):
    sender, receiver = pair
    ids = prompt(100, 3200)
    request_id = unique()
    lease = receiver.post("prep_recv", request_id=request_id, prompt=ids, end=99).json()
    for begin, end in ((0, 50), (50, 99)):
        sent = sender.post(
            "remote_send",
            request_id=unique(),
            prompt=ids,
            begin=begin,
            end=end,
            kv_addr=lease["kv_addr"],
        )
        assert sent.status_code == 200, sent.text
    got = receiver.generate(ids, begin=99, lease_id=lease["lease_id"], request_id=request_id)
    assert tokens(got) == sender.tokens(ids)


def test_a_generation_waits_for_its_kv(pair: list[VllmProcess]):
    sender, receiver = pair
    ids = prompt(100, 3300)
    request_id, found = unique(), []
    lease = receiver.post("prep_recv", request_id=request_id, prompt=ids, end=99).json()
    waiting = threading.Thread(
        target=lambda: found.extend(
            receiver.generate(ids, begin=99, lease_id=lease["lease_id"], request_id=request_id)
        )
    )
    waiting.start()
    sender.post(
        "remote_send",
        request_id=unique(),
        prompt=ids,
        begin=0,
        end=99,
        kv_addr=lease["kv_addr"],
    )
    waiting.join(timeout=20)
    assert found[0]["begin"] == 99
    assert tokens(found) == sender.tokens(ids)


def test_sixteen_prompts_at_once(pair: list[VllmProcess]):
    sender, receiver = pair
    found: dict[int, list[int]] = {}

    def one(number: int) -> None:
        ids = prompt(60 + 5 * number, 4000 + number)
        end = len(ids) - 1 - number % 3
        request_id, lease_id, _ = send(sender, receiver, ids, end)
        got = receiver.generate(ids, begin=end, lease_id=lease_id, request_id=request_id)
        found[number] = tokens(got)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    wanted = {n: sender.tokens(prompt(60 + 5 * n, 4000 + n)) for n in range(16)}
    assert found == wanted


def test_what_a_stream_says_is_what_ours_says(pair: list[VllmProcess]):
    engine = pair[0]
    ids = prompt(40, 5000)
    plain = engine.generate(ids, max_tokens=12)
    assert "".join(event["text"] for event in plain)
    assert plain[-1]["finish_reason"] == "length"
    assert plain[-1]["usage"]["completion_tokens"] == 12
    text = "".join(event["text"] for event in plain)
    stop = text[6:10]
    stopped = engine.generate(ids, max_tokens=12, stop=[stop])
    assert stopped[-1]["finish_reason"] == "stop"
    assert stopped[-1]["stop_reason"] == stop
    assert "".join(event["text"] for event in stopped) == text[: text.index(stop)]
    token = tokens(plain)[4]
    ended = engine.generate(ids, max_tokens=12, stop_token_ids=[token])
    assert tokens(ended) == tokens(plain)[: tokens(plain).index(token) + 1]
    assert ended[-1]["stop_reason"] == token


@compiles
def test_log_probabilities_are_those_of_the_likeliest_tokens(pair: list[VllmProcess]):
    for event in pair[0].generate(prompt(40, 5000), logprobs=2):
        for item in event["logprobs"]:
            assert item["logprob"] == item["top"][0]["logprob"]  # greedy
            assert len(item["top"]) == 2


def test_resumed_greedy_output_goes_on_with_the_same_tokens(pair: list[VllmProcess]):
    first, second = pair
    ids = prompt(50, 5100)
    whole = first.tokens(ids, max_tokens=12)
    rest = second.tokens(ids, max_tokens=12, output=whole[:5])
    assert rest == whole[5:]


def test_seeded_output_depends_on_the_seed_alone(pair: list[VllmProcess]):
    first, second = pair
    ids = prompt(50, 5200)
    sampled = {"temperature": 1.0, "seed": 7, "max_tokens": 10}
    assert first.tokens(ids, **sampled) == second.tokens(ids, **sampled)
    assert first.tokens(ids, **sampled) != first.tokens(ids, **{**sampled, "seed": 8})
    assert first.tokens(ids, **sampled) != first.tokens(ids, **{**sampled, "choice": 1})


def test_structured_output_through_a_lease(pair: list[VllmProcess]):
    sender, receiver = pair
    ids = prompt(50, 5300)
    request_id, lease_id, _ = send(sender, receiver, ids, 49)
    got = receiver.generate(
        ids,
        begin=49,
        lease_id=lease_id,
        request_id=request_id,
        max_tokens=20,
        ignore_eos=False,
        structure={"kind": "regex", "source": "[0-9]{3}x"},
    )
    text = "".join(event["text"] for event in got)
    assert len(text) == 4
    assert text[:3].isdigit() and text[3] == "x"


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_of_a_structured_output_is_the_end_of_the_text(
    pair: list[VllmProcess], ignore_eos: bool
):
    structure = {"kind": "regex", "source": "[0-9]{3}x"}
    got = pair[0].generate(
        prompt(50, 5350), max_tokens=20, ignore_eos=ignore_eos, structure=structure
    )
    text = "".join(event["text"] for event in got)
    assert (len(text), text[3], got[-1]["finish_reason"]) == (4, "x", "stop")


def test_the_prefix_cache_is_told_exactly(pair: list[VllmProcess]):
    engine = pair[0]
    ids = prompt(3 * BLOCK + 5, 5400)
    engine.tokens(ids, max_tokens=1)
    with engine.http.stream("GET", "/microserving/prefixes") as reply:
        first = json.loads(next(reply.iter_lines()))
    assert set(page_names(ids, BLOCK)) <= set(first["added"])
    assert len(page_names(ids, BLOCK)) == 3
    absent = page_names(prompt(BLOCK, 5401), BLOCK)
    assert not set(absent) & set(first["added"])
