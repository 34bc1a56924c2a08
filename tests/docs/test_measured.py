"""The check of the documents' figures finds what differs from the files."""

from __future__ import annotations

import re

import measured
import pytest

RESULT = "bench/results/engine-2026-11-22.json"  # decode_b1: 1.329, medians 77.913 and 58.614
TABLE = """<!-- figures: {files} -->
| work of 5 | ours | ratio |
| --- | --- | --- |
| decode, 1 sequence | {ours} | {ratio} |

999 is in no block.
"""


def found(text: str) -> list[str]:
    (block,) = measured.blocks("page.md", text)
    return measured.unknown(block)


@pytest.mark.parametrize(
    ("ours", "ratio", "wrong"),
    [
        ("78", "1.33", []),
        ("77.9", "**1.3**", []),
        ("77", "1.33", ["77"]),
        ("78", "1.32", ["1.32"]),
        ("`77`", "1.330", ["1.330"]),
    ],
)
def test_figures_are_the_files_rounded_as_shown(ours, ratio, wrong):
    assert found(TABLE.format(files=RESULT, ours=ours, ratio=ratio)) == wrong


def test_shares_may_be_percentages_and_ranges_of_them():
    """overhead_b32: 0.022 to 0.026."""
    line = f"<!-- figures: {RESULT}#overhead_b32 -->\n"
    assert found(line + "It takes 2.2–2.6 % or 2.4 %.") == []
    assert found(line + "It takes 2.4 of it, or 2.7 %.") == ["2.4", "2.7"]


def test_other_numbers_are_named_and_parts_narrow_the_search():
    text = "Prompts of 1024 tokens: 2590."
    assert found(f"<!-- figures: {RESULT}; besides: 1024 -->\n{text}") == []
    assert found(f"<!-- figures: {RESULT}#tokens_per_second.vllm -->\n{text}") == ["1024", "2590"]


def test_a_file_that_is_not_there_and_a_line_that_is_none():
    with pytest.raises(OSError, match="gone"):
        found(TABLE.format(files="bench/results/gone.json", ours=1, ratio=1))
    with pytest.raises(KeyError, match="gone"):
        found(TABLE.format(files=f"{RESULT}#gone", ours=1, ratio=1))
    with pytest.raises(ValueError, match="not of the form"):
        found("<!-- figures -->\n1")


def test_each_result_of_the_page_of_measurements_is_held_to_its_file():
    page = (measured.ROOT / "docs" / "performance.md").read_text()
    overview = re.findall(r"^\| \[.*`(bench/results/[^`*]+\.json)` \|", page, re.M)
    named = {
        name.partition("#")[0]
        for block in measured.blocks("docs/performance.md", page)
        for name in block.files
    }
    assert len(overview) > 10 and set(overview) <= named
