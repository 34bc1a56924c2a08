"""Files of request bodies."""

from __future__ import annotations

import itertools
import json

import pytest

from engine.protocol import BadRequest
from router.workload.bodies import bodies, is_body

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


def test_bodies_are_read_again_and_again(tmp_path):
    path = tmp_path / "bodies.jsonl"
    path.write_text(f'"hello"\n{json.dumps(CHAT)}\n\n{{"prompt": [1, 2]}}\n')
    requests = list(itertools.islice(bodies(path, 9), 4))
    assert [request.body for request in requests] == [
        {"prompt": "hello", "max_tokens": 9}, CHAT, {"prompt": [1, 2], "max_tokens": 9},
        {"prompt": "hello", "max_tokens": 9},
    ]  # fmt: skip
    assert [request.input_tokens for request in requests] == [None, None, 2, None]


@pytest.mark.parametrize("bad", ["{}", "3", "{", '{"prompt": "a", "messages": []}', "[" * 10**5])
def test_a_bad_line_is_named_before_the_first_request(tmp_path, bad):
    path = tmp_path / "bodies.jsonl"
    path.write_text(f'"hello"\n\n{bad}\n')
    with pytest.raises(BadRequest, match=r"bodies\.jsonl:3: "):
        bodies(path, 9)


def test_an_empty_file(tmp_path):
    path = tmp_path / "bodies.jsonl"
    path.write_text("\n\n")
    with pytest.raises(BadRequest, match="the file is empty"):
        bodies(path, 9)


def test_which_lines_are_bodies():
    for line in ('"text"', '{"prompt": 3}', '{"messages": []}'):
        assert is_body(line)
    for line in ("3", "{", '{"timestamp": 1}', "a,b", "[" * 10**5):
        assert not is_body(line)
