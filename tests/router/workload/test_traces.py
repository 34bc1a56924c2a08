"""Traces as workloads: times, lengths, shared pages, and files that are none."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from engine.protocol import BadRequest, page_names
from router.workload.trace_formats import AZURE, MOONCAKE, RECORDED, format_of
from router.workload.traces import Trace

PAGE = 16
SHIPPED = Path(__file__).parents[3] / "examples" / "traces"


def trace_of(path: Path) -> Trace:
    with path.open() as file:
        return Trace.read(path, format_of(next(file).strip()))


def write(path: Path, rows) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def row(timestamp=0, input_length=600, output_length=20, hash_ids=()):
    return {
        "timestamp": timestamp, "input_length": input_length, "output_length": output_length,
        "hash_ids": list(hash_ids),
    }  # fmt: skip


def prompts(requests):
    return [request.body["prompt"] for request in requests]


def common(one, other):
    """Return how many tokens two prompts begin with in common."""
    pairs = zip(one, other, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


@pytest.mark.parametrize(
    ("name", "format", "count", "seconds", "first", "last"),
    [
        ("azure_conv.csv", AZURE, 500, 129.012474, (374, 44), (1033, 420)),
        ("azure_code.csv", AZURE, 500, 232.801087, (4808, 10), (866, 14)),
        ("mooncake_conversation.jsonl", MOONCAKE, 239, 74.999, (4743, 541), (24982, 440)),
    ],
)
def test_the_shipped_traces(name, format, count, seconds, first, last):
    trace = trace_of(SHIPPED / name)
    assert (trace.format, trace.count) == (format, count)
    assert trace.seconds == pytest.approx(seconds, abs=1e-5)
    requests = list(trace.requests(0))
    assert len(requests) == count
    sizes = [(request.input_tokens, request.body["max_tokens"]) for request in requests]
    assert (sizes[0], sizes[-1]) == (first, last)
    assert all(len(request.body["prompt"]) == request.input_tokens for request in requests)
    times = [request.at_s for request in requests]
    assert times == sorted(times) and times[0] == 0 and times[-1] == pytest.approx(trace.seconds)
    assert (SHIPPED / name).stat().st_size < 60_000


def test_the_shipped_prompts_share_pages_as_their_hash_ids_do():
    path = SHIPPED / "mooncake_conversation.jsonl"
    with path.open() as file:
        ids = [json.loads(line)["hash_ids"] for line in file]
    made = prompts(trace_of(path).requests(0))
    sharing = []
    for a, b in itertools.combinations(range(len(ids)), 2):
        same = common(ids[a], ids[b])
        if b < 9 or 1 < same < 50:  # all begin with block 0, and few share more
            want = min(512 * same, len(made[a]), len(made[b]))
            assert want <= common(made[a], made[b]) < want + 4
            sharing.append(same)
    assert len(sharing) == 36 + 16


def test_a_speed_and_a_scale():
    path = SHIPPED / "mooncake_conversation.jsonl"
    plain = list(trace_of(path).requests(0))
    for fast, slow in zip(trace_of(path).requests(0, speed=4.0), plain, strict=True):
        assert fast.at_s == pytest.approx(slow.at_s / 4) and fast.body == slow.body
    small = list(trace_of(path).requests(0, scale=0.1))
    for one, other in zip(small, plain, strict=True):
        assert one.at_s == other.at_s
        assert one.input_tokens == len(one.body["prompt"]) == round(other.input_tokens * 0.1)
        assert one.body["max_tokens"] == max(1, round(other.body["max_tokens"] * 0.1))


def test_shared_prefixes_scale_too(tmp_path):
    rows = [row(0, 1200, 20, [1, 2, 3]), row(1000, 1100, 30, [1, 2, 4])]
    trace = trace_of(write(tmp_path / "t", rows))
    for scale, tokens in ((1.0, 1024), (1 / 16, 64), (0.003, 3), (2.0, 2048)):
        one, other = prompts(trace.requests(0, scale=scale))
        assert tokens <= common(one, other) <= tokens + 1
    [one, other] = trace.requests(0, scale=1e-9)
    assert one.input_tokens == other.body["max_tokens"] == 1


def test_tokens_beyond_the_last_id_are_the_requests_own(tmp_path):
    rows = [row(0, 700, 1, [1]), row(0, 700, 1, [1]), row(0, 512, 1, [1])]
    one, other, short = prompts(trace_of(write(tmp_path / "t", rows)).requests(0))
    assert 512 <= common(one, other) < 516
    assert short == one[:512]


def test_the_same_seed_gives_the_same_requests(tmp_path):
    pages = ["0123456789abcdef"]
    record = {"at_s": 1, "input_tokens": 20, "output_tokens": 5, "pages": pages}
    for rows in ([row(0, 600, 20, [1])], [record]):
        trace = trace_of(write(tmp_path / "t", rows))
        assert list(trace.requests(1)) == list(trace.requests(1))
        one, other = prompts([*trace.requests(1), *trace.requests(2)])
        assert common(one, other) < 4
    first = SHIPPED / "azure_conv.csv"
    one, other = (next(trace_of(first).requests(seed)) for seed in (1, 2))
    assert one.body["prompt"] != other.body["prompt"]


def recording(source: random.Random):
    """Return prompts that branch off each other, and the records that a router keeps of them."""
    prompts = [[source.randrange(500) for _ in range(source.randrange(1, 200))]]
    for _ in range(60):
        old = source.choice(prompts)
        kept = old[: source.randrange(len(old) + 1)]
        prompts.append([*kept, *(source.randrange(500) for _ in range(source.randrange(1, 100)))])
    records = [
        {
            "at_s": number / 2, "input_tokens": len(prompt), "output_tokens": 7,
            "pages": page_names(prompt, PAGE), "session": f"s{number % 3}", "strategy": "migrate",
        }
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    return prompts, records


def test_requests_share_exactly_the_pages_that_they_shared_in_the_recording(tmp_path):
    recorded, records = recording(random.Random(0))
    requests = list(trace_of(write(tmp_path / "t", records)).requests(0))
    assert [request.at_s for request in requests] == [number / 2 for number in range(61)]
    assert {request.session for request in requests} == {"s0", "s1", "s2"}
    assert {request.strategy for request in requests} == {"migrate"}
    assert {request.body["max_tokens"] for request in requests} == {7}
    old = [set(page_names(prompt, PAGE)) for prompt in recorded]
    new = [set(page_names(prompt, PAGE)) for prompt in prompts(requests)]
    assert [len(pages) for pages in new] == [len(pages) for pages in old]
    sharing = 0
    for a, b in itertools.combinations(range(61), 2):
        assert len(new[a] & new[b]) == len(old[a] & old[b])
        sharing += bool(old[a] & old[b])
    assert sharing > 100
    assert not set(itertools.chain(*recorded)) <= set(itertools.chain(*prompts(requests)))


def test_a_trace_is_read_as_its_requests_are_taken(tmp_path):
    path = write(tmp_path / "t", [row(at) for at in range(2000)])
    requests = trace_of(path).requests(0)
    assert next(requests).at_s == 0
    with path.open("a") as file:
        file.write("broken\n")
    with pytest.raises(BadRequest, match="t:2001: "):
        list(requests)


@pytest.mark.parametrize(
    ("rows", "line"),
    [
        (["{"], 2), (["{}"], 2), (['"text"'], 2), ([json.dumps(row(input_length=-1))], 2),
        ([json.dumps(row(output_length=-1))], 2), (["", json.dumps(row(99))], 3),
        ([json.dumps(row(100)), json.dumps(row(99.5))], 3), (["[" * 10**5], 2),
        (['{"unknown": ' + "[" * 10**5], 2),
    ],
)  # fmt: skip
def test_a_broken_line_is_named_before_the_first_request(tmp_path, rows, line):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([json.dumps(row(100)), *rows]))
    with pytest.raises(BadRequest, match=rf"trace\.jsonl:{line}: ") as caught:
        Trace.read(path, MOONCAKE)
    assert "\n" not in caught.value.message and len(caught.value.message) < 300


def test_azures_lines_are_counted_with_their_header(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(
        b"\xef\xbb\xbfTIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 18:17:03.97,1,2\r\n2023-11-16 18:17:03.96,1,2\r\n"
    )
    with pytest.raises(BadRequest, match=r"trace\.csv:3: its time is before"):
        Trace.read(path, AZURE)


@pytest.mark.parametrize("text", ["", "\n \n", "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_a_trace_without_requests(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(BadRequest, match=r"trace\.csv: a trace without requests"):
        Trace.read(path, AZURE)


def test_files_that_are_no_text_or_cannot_be_read(tmp_path):
    path = tmp_path / "trace"
    path.write_bytes(json.dumps(row()).encode() + b"\n\xff\xfe\n")
    with pytest.raises(BadRequest, match="trace:2: no UTF-8 text"):
        Trace.read(path, MOONCAKE)
    for bad in (tmp_path, tmp_path / "none"):
        with pytest.raises(BadRequest, match=str(bad)):
            Trace.read(bad, RECORDED)


def test_a_scale_that_no_machine_can_hold(tmp_path):
    trace = trace_of(write(tmp_path / "t", [row(output_length=30)]))
    with pytest.raises(BadRequest, match="600 tokens times 1e"):
        trace.requests(0, scale=1e9)
