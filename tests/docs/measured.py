"""Checks that the figures of the documents are those of the result files that they name.

A line `<!-- figures: bench/results/NAME.json … -->` names the files of the block below it: a table
or a paragraph, up to the next empty line. Each number of the block has to be a value of the files,
rounded to as many digits as are shown. Numbers that are none, such as a length of prompts, follow
in the line: `<!-- figures: NAME.json; besides: 1024, 3000 -->`.

What counts as a value: each number of the file, the middle one of each list of numbers, and how
many a list has. A ratio of two values is none: a script writes it to its file, or it is named in
the line. Before `%` a value is a share of 1, and before `s` it may be in milliseconds. Signs are
not compared. Code, links, and the header and first column of a table are not looked at.
`NAME.json#part.part` takes the values of a part of the file alone: large files hold so many that a
wrong number may equal one by chance.

`make check` runs this. It names each number that no value gives, and each file that is not there.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, ROUND_HALF_UP, Decimal
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/performance.md", "docs/gpu.md")
LINE = re.compile(r"^<!-- figures: (?P<files>[^;]+?)(?:; besides: (?P<besides>.+?))? -->$")
NOT_TEXT = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|\*\*")  # code, links, bold type
# Not in a word or a version: `P99`, `bf16` and `0.32.0` have no figure.
# The group `unit` ends with `%` also at the beginning of a range, as in `2 to 3 %`.
NUMBER = re.compile(
    r"(?<![\w.])(?P<number>\d{1,3}(?:,\d{3})+|\d+(?:\.\d+)?)(?![\d.]*\.\d)(?!\w)"
    r"(?=(?P<unit>(?:(?:–| to | ± )[−+]?[\d.]+)?\s?%| s\b)?)"
)


@dataclass(frozen=True)
class Block:
    """A part of a page, with the files and the other numbers that its line names."""

    page: str
    line: int
    files: tuple[str, ...]
    besides: frozenset[str]
    text: str


def blocks(page: str, text: str) -> Iterator[Block]:
    """Yield the blocks of a page that have a line."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if found := LINE.match(line):
            end = number + 1
            while end < len(lines) and lines[end].strip():
                end += 1
            besides = frozenset((found["besides"] or "").split(", "))
            yield Block(
                page, number + 1, tuple(found["files"].split()), besides,
                "\n".join(figures_of(lines[number + 1 : end])),
            )  # fmt: skip
        elif line.startswith("<!-- figures"):
            raise ValueError(f"{page}:{number + 1}: not of the form `<!-- figures: FILE -->`")


def figures_of(lines: list[str]) -> list[str]:
    """Return what may hold figures: of a table, all but its header and its first column."""
    if not lines or not lines[0].startswith("|"):
        return lines
    return [line.split("|", 2)[2] for line in lines[2:]]


def values(data: Any) -> Iterator[Decimal]:
    """Yield all values of a document that a text may show."""
    if isinstance(data, dict):
        for each in data.values():
            yield from values(each)
    elif isinstance(data, list):
        yield Decimal(len(data))
        numbers = [each for each in data if isinstance(each, int | float) and isfinite(each)]
        if numbers and len(numbers) == len(data):
            yield Decimal(str(median(numbers)))
        for each in data:
            yield from values(each)
    elif isinstance(data, int | float) and not isinstance(data, bool) and isfinite(data):
        yield Decimal(str(data))


def shown(number: str, unit: str, found: set[Decimal]) -> bool:
    """Return whether a number is one of the values in this unit, rounded to its digits."""
    wanted = Decimal(number.replace(",", ""))
    scales = [Decimal(1)]
    if unit.endswith("%"):
        scales = [Decimal(100)]
    elif unit:
        scales.append(Decimal("0.001"))
    last_digit = Decimal(1).scaleb(int(wanted.as_tuple().exponent))
    return any(
        wanted == (abs(value) * scale).quantize(last_digit, rounding=rounding)
        for value in found
        for scale in scales
        for rounding in (ROUND_HALF_UP, ROUND_HALF_EVEN)
    )


def load(name: str) -> Any:
    """Return what `FILE` or `FILE#part.part` holds."""
    path, _, parts = name.partition("#")
    data = json.loads((ROOT / path).read_text())
    for part in filter(None, parts.split(".")):
        data = data[part]
    return data


def unknown(block: Block) -> list[str]:
    """Return the numbers of a block that no value of its files gives."""
    found = {value for name in block.files for value in values(load(name))}
    text = NOT_TEXT.sub(" ", block.text)
    return [
        number
        for number, unit in NUMBER.findall(text)
        if number not in block.besides and not shown(number, unit, found)
    ]


def main() -> None:
    count, wrong = 0, []
    for page in PAGES:
        for block in blocks(page, (ROOT / page).read_text()):
            count += 1
            where = f"{block.page}:{block.line}"
            try:
                numbers = unknown(block)
            except (OSError, KeyError) as error:
                wrong.append(f"{where}: no such file, or part of it: {error}")
                continue
            if numbers:
                wrong.append(f"{where}: not in {', '.join(block.files)}: {', '.join(numbers)}")
    if wrong:
        sys.exit("\n".join(wrong))
    print(f"the figures of {count} blocks are those of their files")


if __name__ == "__main__":
    main()
