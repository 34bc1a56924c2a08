"""Lines of a stream, however it is split, and their longest length."""

from __future__ import annotations

import pytest

from router.base.errors import EngineUnreachable
from router.engines.lines import Lines


def test_lines_are_whole_however_they_arrive():
    data = b"one\n\ntwo three\nfour\n"
    assert Lines(100).feed(data) == [b"one", b"", b"two three", b"four"]
    for size in (1, 2, 3, 7):
        lines, got = Lines(100), []
        for at in range(0, len(data), size):
            got += lines.feed(data[at : at + size])
        assert got == [b"one", b"", b"two three", b"four"]


def test_an_incomplete_line_is_bounded():
    lines = Lines(10)
    assert lines.feed(b"x" * 5) == lines.feed(b"x" * 5) == []
    assert lines.feed(b"\nab") == [b"x" * 10]
    assert lines.feed(b"x" * 8) == []  # what came before the line feed counts no longer
    with pytest.raises(EngineUnreachable, match="more than 10 bytes"):
        lines.feed(b"x")
