"""What a paper says, what came out here, and the verdict.

A verdict follows from numbers by a rule, so that it changes with them:

- An effect (a gain of 21 %, a factor of 1.7) is reproduced if ours is within a quarter of it. It is
  reproduced in direction if ours has the same sign and is more than 2 %. Else it is not.
- A size (a rate, a time) is reproduced if ours is within a quarter of it, and else it is not.
- A table is reproduced if every entry agrees to the precision that the paper prints.
- A statement without a number is reproduced if it holds wherever it was tested, and in direction if
  it holds in most places.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = [
    "NONE",
    "Answer",
    "Claim",
    "Panel",
    "Part",
    "Verdict",
    "by_effect",
    "by_places",
    "by_size",
    "rounded",
]

Verdict = Literal["reproduced", "in direction", "not reproduced", "not simulated"]
CLOSE, NONE = 0.25, 0.02


@dataclass(frozen=True, slots=True)
class Answer:
    """What came out in one setting."""

    ours: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim of a paper, with an answer for each setting in which it was tested."""

    figure: str
    says: str
    answers: dict[str, Answer]  # by the setting
    why: str  # how ours was obtained, and why it differs


@dataclass(frozen=True, slots=True)
class Panel:
    """A part of a picture: lines over x. Dashed lines begin with the name of another one."""

    title: str
    x: str
    y: str
    lines: dict[str, list[tuple[float, float]]]
    dashed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Some figures of a paper: their numbers, claims and pictures (panels by file name)."""

    data: dict[str, Any]
    claims: list[Claim]
    pictures: dict[str, list[Panel]] = field(default_factory=dict)


def by_effect(paper: float, ours: float) -> Verdict:
    """Return the verdict on an effect, which is 0 where there is none."""
    if abs(ours - paper) <= CLOSE * abs(paper):
        return "reproduced"
    return "in direction" if ours * paper > 0 and abs(ours) > NONE else "not reproduced"


def by_size(paper: float, ours: float) -> Verdict:
    """Return the verdict on a size, which has no direction."""
    return "reproduced" if abs(ours - paper) <= CLOSE * paper else "not reproduced"


def by_places(places: Iterable[bool]) -> Verdict:
    """Return the verdict on a statement, given where it holds."""
    held = list(places)
    if all(held):
        return "reproduced"
    return "in direction" if sum(held) > len(held) / 2 else "not reproduced"


def rounded(value: Any) -> Any:
    """Return a document with all numbers to five digits, which no machine rounds differently."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {str(key): rounded(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return value
