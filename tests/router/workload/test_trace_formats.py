"""Lines of traces: what they say, and all the ways in which they can be broken."""

from __future__ import annotations

import json

import pytest

from router.workload.request import MOST_TOKENS
from router.workload.trace_formats import AZURE, AZURE_HEADER, MOONCAKE, RECORDED, format_of

PAGE = "00112233445566ff"
ROW = {"timestamp": 1500, "input_length": 600, "output_length": 20, "hash_ids": [4, 7]}
RECORD = {"at_s": 2.5, "input_tokens": 40, "output_tokens": 3, "pages": [PAGE, "f" * 16]}


def line(row, **changes):
    return json.dumps({name: value for name, value in {**row, **changes}.items() if value != ...})


def test_a_line_of_mooncake():
    entry = MOONCAKE.parse(line(ROW))
    assert (entry.at_s, entry.input_tokens, entry.output_tokens) == (1.5, 600, 20)
    assert (entry.blocks, entry.session, entry.strategy) == (["4", "7"], None, None)
    assert MOONCAKE.parse(line(ROW, hash_ids=[])).blocks == []
    assert MOONCAKE.parse(line(ROW, another="field")) == entry


def test_a_line_of_azure():
    first = AZURE.parse("2023-11-16 18:17:03.9799600,4808,10")
    second = AZURE.parse("2023-11-16 18:17:04.0319600,0,0")
    assert second.at_s - first.at_s == pytest.approx(0.052, abs=1e-6)
    assert (first.input_tokens, first.output_tokens, first.blocks) == (4808, 10, [])
    later = AZURE.parse("2024-05-10 00:00:01.500000+00:00,1,2")  # as the traces of 2024
    assert AZURE.parse("2024-05-10 02:00:03.500000+02:00,1,2").at_s - later.at_s == 2


def test_a_line_of_recorded_traffic():
    entry = RECORDED.parse(line(RECORD, session="s", strategy="migrate"))
    assert (entry.at_s, entry.input_tokens, entry.output_tokens) == (2.5, 40, 3)
    assert entry.blocks == [PAGE, "f" * 16]
    assert (entry.session, entry.strategy) == ("s", "migrate")
    assert RECORDED.parse(line(RECORD)).session is None


BAD_NUMBERS = [-1, MOST_TOKENS + 1, "5", 1.5, None, True, ...]


@pytest.mark.parametrize("length", BAD_NUMBERS)
@pytest.mark.parametrize("field", ["input_length", "output_length"])
def test_bad_lengths_of_mooncake(field, length):
    with pytest.raises(ValueError, match=field):
        MOONCAKE.parse(line(ROW, hash_ids=[], **{field: length}))


@pytest.mark.parametrize("length", BAD_NUMBERS)
@pytest.mark.parametrize("field", ["input_tokens", "output_tokens"])
def test_bad_lengths_of_records(field, length):
    with pytest.raises(ValueError, match=field):
        RECORDED.parse(line(RECORD, pages=[], **{field: length}))


@pytest.mark.parametrize("time", ["1", None, 1e13, -1e13, True, ...])
def test_bad_times(time):
    with pytest.raises(ValueError, match="timestamp"):
        MOONCAKE.parse(line(ROW, timestamp=time))
    with pytest.raises(ValueError, match="at_s"):
        RECORDED.parse(line(RECORD, at_s=time))


@pytest.mark.parametrize("text", ["NaN", "1e999", "-Infinity"])
def test_times_that_are_no_numbers(text):
    with pytest.raises(ValueError):
        MOONCAKE.parse(line(ROW).replace("1500", text))


@pytest.mark.parametrize("ids", [["4"], [None], 4, [1.5], ..., [1, 2, 3]])
def test_bad_hash_ids(ids):
    with pytest.raises(ValueError, match="hash_ids"):
        MOONCAKE.parse(line(ROW, hash_ids=ids))


@pytest.mark.parametrize(
    "pages",
    [[3], ["0" * 15], ["0" * 17], ["0" * 15 + "g"], ["A" * 16], ["0" * 16 + "\n"], "0" * 16, ...,
     [PAGE] * 3],
)  # fmt: skip
def test_bad_pages(pages):
    with pytest.raises(ValueError, match="pages"):
        RECORDED.parse(line(RECORD, pages=pages))


@pytest.mark.parametrize("name", ["a\r\nHost: b", "a\n", "\x00", "a" * 257, 3])
def test_names_that_cannot_be_sent_on(name):
    for field in ("session", "strategy"):
        with pytest.raises(ValueError, match=field):
            RECORDED.parse(line(RECORD, **{field: name}))


@pytest.mark.parametrize(
    "text",
    ["", "a", "2023-11-16 18:17:03.97,1", "2023-11-16 18:17:03.97,1,2,3", "yesterday,1,2",
     "2023-11-16 18:17:03.97,-1,2", "2023-11-16 18:17:03.97,1,-2", "2023-11-16 18:17:03.97,1,",
     f"2023-11-16 18:17:03.97,{MOST_TOKENS + 1},2", "2023-11-16 18:17:03.97,1.5,2",
     "2023-13-16 18:17:03.97,1,2", f"2023-11-16 18:17:03.97,{'9' * 5000},2"],
)  # fmt: skip
def test_bad_lines_of_azure(text):
    with pytest.raises(ValueError):
        AZURE.parse(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '"a"', "null", "{}}", '{"a": "\\ud800"}'])
def test_lines_that_are_no_objects(text):
    for format in (MOONCAKE, RECORDED):
        with pytest.raises(ValueError):
            format.parse(text)


def test_the_first_line_tells_the_format():
    assert format_of(line(ROW)) is MOONCAKE
    assert format_of(line(RECORD)) is RECORDED
    assert format_of(AZURE_HEADER) is AZURE
    assert format_of('{"timestamp": "broken"}') is MOONCAKE
    for none in ("", "{", "[1]", "TIMESTAMP", '{"prompt": "a"}', '"text"', "3", "[" * 10**5):
        assert format_of(none) is None
