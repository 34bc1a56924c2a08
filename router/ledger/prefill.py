"""Where the KV of a prompt goes, planned from its length (Infinite-LLM, section 4.6)."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import BadRequest, NoCapacity
from router.base import EngineId
from router.ledger.ledger import Ledger

__all__ = ["Part", "plan_prefill"]


@dataclass(frozen=True, slots=True)
class Part:
    """Pages `begin` to `end` of a prompt, `end` excluded, and the instance that holds their KV.

    Whether the instance also computes them, or gets them from the one that does, is the caller's
    choice: a put and a prefill need the same pages.
    """

    instance: EngineId
    begin: int
    end: int


def plan_prefill(
    ledger: Ledger, instance: EngineId, pages: int, *, local: int, least: int = 1
) -> list[Part]:
    """Return the consecutive parts of a prompt of `pages` pages that is decoded on `instance`.

    `local` is how many pages `instance` can use of its own, after what the output needs. They hold
    the end of the prompt, because the output continues there. Other instances hold what comes
    before, in the order of `Ledger.candidates`, each as much as it can lend. Of them, only those
    with `least` pages or more take part: each part costs a merge per layer and step. What they are
    to lend counts as lent until their next heartbeats.

    Raises `BadRequest` for fewer than 1 page, `local` below 0 or `least` below 1, and `NoCapacity`
    if there are not enough pages. An error changes nothing.
    """
    if pages < 1 or local < 0 or least < 1:
        raise BadRequest("a prompt has at least one page, and so has each part", param="pages")
    missing, parts, begin = max(0, pages - local), [], 0
    for creditor in ledger.creditors(instance, least) if missing else ():
        end = min(missing, begin + creditor.available)
        parts.append(Part(creditor.instance, begin, end))
        begin = end
        if begin == missing:
            break
    if begin < missing:
        raise NoCapacity(f"{pages} pages wanted, {local + begin} available")
    for part in parts:
        ledger.expect(part.instance, part.end - part.begin)
    if begin < pages:
        parts.append(Part(instance, begin, pages))
    return parts
