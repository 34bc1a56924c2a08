"""How long the prefix cache takes to find a long prompt among many pages, and to evict one.

Purpose: a match is made for every request, under the cache's lock: its cost must be negligible
beside a step.

Theory: following a path of the radix tree is one comparison of memory a node, so a match costs what
comparing its bytes costs, plus a dictionary lookup a node. The limit is one `bytes` comparison of
the whole prompt.

How: 100,000 cached pages of 16 tokens, of prompts of 10,000 tokens each of which branches off an
earlier one at a random place, as conversations do. All are looked up: as int32 arrays, as lists
(which have to be converted), and one of which nothing is cached. Then pages are taken while none
is free, one by one and a prompt's at a time: each evicts the least recently used.

Run: `make bench-prefix`, or `python -m bench.prefix [--save]`.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.report import only_save, publish, table
from kvcache.pages.page_manager import PageManager

PAGE, PAGES, TOKENS = 16, 100_000, 10_000
ROUNDS = 300


def main() -> None:
    """Measure, print the table, publish the JSON."""
    only_save(__doc__)
    manager = PageManager(PAGES + 1, PAGE)
    prompts = fill(manager)
    cache = manager.prefix
    rng = random.Random(1)
    chosen = [prompts[rng.randrange(len(prompts))] for _ in range(ROUNDS)]
    for prompt in chosen:
        found = len(cache.match(prompt)) * PAGE
        if found != len(prompt):
            raise SystemExit(f"{found} of {len(prompt)} tokens were found")
    strange = np.full(TOKENS, 99, dtype=np.int32)
    lists = [prompt.tolist() for prompt in chosen]
    pairs = [(prompt.tobytes(), prompt.tobytes()) for prompt in chosen]
    figures = {
        "match_array_us": timed(cache.match, chosen),
        "match_list_us": timed(cache.match, lists),
        "miss_us": timed(cache.match, [strange] * ROUNDS),
        "limit_us": timed(lambda pair: pair[0] == pair[1], pairs),
    }
    nodes, pages = sum(1 for _ in cache.holders()), cache.cached
    manager.take(manager.pool.free)
    # Alternate one page, as for a growing decode, with a prompt's worth; everything is cached.
    figures["take_one_page_us"] = timed(manager.take, [1] * ROUNDS)
    figures["take_a_prompt_us"] = timed(manager.take, [TOKENS // PAGE] * (ROUNDS // 10))
    rows = [[name, *(f"{value:.1f}" for value in by.values())] for name, by in figures.items()]
    table(f"{TOKENS} tokens among {pages} pages in {nodes} nodes, µs", ["", "p50", "p99"], rows)
    publish("prefix", {"pages": pages, "nodes": nodes, "tokens": TOKENS, **figures})


def fill(manager: PageManager) -> list[npt.NDArray[np.int32]]:
    """Cache prompts until the pages are used up; each continues a part of an earlier one."""
    rng = np.random.default_rng(1)
    length = TOKENS // PAGE
    prompts: list[npt.NDArray[np.int32]] = []
    while True:
        stem = prompts[rng.integers(len(prompts))] if prompts else np.empty(0, np.int32)
        kept = int(rng.integers(length)) if prompts else 0
        if manager.pool.free < length - kept:
            return prompts
        fresh = rng.integers(0, 50_000, (length - kept) * PAGE, dtype=np.int32)
        prompt = np.concatenate((stem[: kept * PAGE], fresh))
        pages = manager.share(manager.prefix.match(prompt[: kept * PAGE])) + manager.take(
            length - kept
        )
        manager.prefix.insert(prompt, pages)
        manager.drop(pages)
        prompts.append(prompt)


def timed(run: Callable[[Any], object], over: Sequence[Any]) -> dict[str, float]:
    """Return the microseconds of a call, including garbage collection."""
    took = []
    for each in over:
        began = time.perf_counter()
        run(each)
        took.append(1e6 * (time.perf_counter() - began))
    return {"p50": statistics.median(took), "p99": statistics.quantiles(took, n=100)[98]}


if __name__ == "__main__":
    main()
