"""What a layer of attention costs over KV in another process, against the same KV in the own pool.

Purpose: an engine that has borrowed pages ships its queries to them in every layer (DistAttention,
Infinite-LLM, section 4.2). The exchange should cost little beside the computation, which moves from
one engine to the other: the KV is read once wherever it lies.

Theory: to a creditor travel `heads·head_dim` elements per row, and back `heads·(4·head_dim + 8)`
bytes per part and row: 2.3 KB each in SmolLM2's float32, where the KV of 512 tokens has 786 KB per
layer. In shared memory they are copied once on each side; the rest is two wake-ups of a process. A
step computes its local part meanwhile, which is not in these figures: `exchange` counts from the
queries to the parts with nothing in between.

How: one creditor process with one thread, SmolLM2's shape, rows that decode one sequence each over
`KEYS` of it at the creditor. `local` is the plan of one engine over as many keys in the own pool,
`creditor` what the creditor says it computed. Medians over `REPEATS` layers, alternating.

Run: `make bench-remote-attention`, or `python -m bench.remote_attention [--save]`.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from bench.report import only_save, publish, spread, table
from kvcache.attention import (
    HeldSpan,
    MergedSpan,
    MergePlan,
    PartRows,
    Ranges,
    held_planner_for,
    planner_for,
)
from kvcache.lease import Identity
from kvcache.memory import KVLayout, SharedRegion
from kvcache.remote_attention import (
    AttentionShape,
    BorrowedPages,
    Creditor,
    RemoteAttention,
    RemoteSpan,
)
from kvcache.sequences import Span
from kvcache.transport import Network
from kvcache.types import EngineId, LeaseId, TokenPos

LAYERS, PAGE_SIZE, KV_HEADS, HEADS, HEAD_DIM = 30, 16, 3, 9, 64  # SmolLM2's shape
KEYS = (512, 2048, 6016)  # whole blocks
ROWS = (1, 4, 16)
REPEATS = 40
LOCAL = 128  # keys of each row that are in the own pool besides
CREDITOR = EngineId("creditor")
CPU = torch.device("cpu")


def layout_for(dtype: torch.dtype) -> KVLayout:
    """Return a pool that has the longest context once; rows share its pages in turn."""
    return KVLayout(4, 1 + (max(KEYS) + LOCAL) // PAGE_SIZE, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype)


def identity(name: str) -> Identity:
    return Identity(EngineId(name), 1, b"bench", "same")


def filled(layout: KVLayout) -> SharedRegion:
    """Return memory of random keys and values."""
    region = SharedRegion.create(layout, 1)
    region.pool.normal_()
    region.pool[:, 0] = 0
    return region


def serve(pipe: Connection, dtype: torch.dtype) -> None:
    """Be a creditor until the pipe closes."""
    layout = layout_for(dtype)
    region = filled(layout)
    creditor = Creditor(
        region.pool,
        layout,
        query_heads=HEADS,
        identity=identity(CREDITOR),
        bad_loans=lambda debtor, pages_of: (),
        share=1.0,
        network=Network("127.0.0.1"),
    )
    pipe.send(creditor.endpoints)
    pipe.poll(None)


def remote_spans(rows: int, keys: int) -> list[RemoteSpan]:
    """Return decodes over `keys` at the creditor; each has its pages in another order."""
    spans = []
    for row in range(rows):
        pages = np.array(
            random.Random(row).sample(range(1, 1 + keys // PAGE_SIZE), keys // PAGE_SIZE)
        )
        numbers = np.arange(len(pages), dtype=np.int32)
        borrowed = BorrowedPages(LeaseId("loan"), pages.astype(np.int32), numbers)
        spans.append(RemoteSpan(row, TokenPos(keys + LOCAL - 1), 1, (borrowed,)))
    return spans


def measure(
    debtor: RemoteAttention, pool: torch.Tensor, layout: KVLayout, rows: int, keys: int
) -> dict[str, list[float]]:
    """Return µs of an exchange and its parts, of local attention and of the merge."""
    q = torch.randn(rows, HEADS, HEAD_DIM).to(layout.dtype)
    group = HEADS // KV_HEADS
    spans = remote_spans(rows, keys)
    whole = []
    for span in spans:
        own = np.array([*span.borrowed[0].pages, *range(1, 1 + LOCAL // PAGE_SIZE)], np.int32)
        whole.append(Span(span.row, span.start, 1, own))
    plan = planner_for(layout, group, CPU)(whole)
    first = keys // PAGE_SIZE
    held = held_planner_for(layout, group, CPU)(
        [
            HeldSpan(
                span.row,
                span.start,
                1,
                span.pages[first:],
                np.arange(first, len(span.pages), dtype=np.int32),
            )
            for span in whole
        ]
    )
    found: dict[str, list[float]] = {name: [] for name in ("exchange", "local", "merge")}
    debtor.begin_step({CREDITOR: spans})
    plan_of_merge: MergePlan | None = None
    for repeat in range(-5, REPEATS):
        layer = repeat % layout.layers
        times = [time.perf_counter()]
        debtor.send(layer, q)
        answer = debtor.receive(layer)[CREDITOR]
        times.append(time.perf_counter())
        if plan_of_merge is None:
            plan_of_merge = merge_plan(held.part_ranges, answer.ranges, whole)
        plan.attend(pool[layer], q)
        times.append(time.perf_counter())
        mine = held.attend_rows(pool[layer], q)
        times.append(time.perf_counter())
        plan_of_merge.write([mine, answer.rows], torch.empty_like(q))
        times.append(time.perf_counter())
        if repeat >= 0:
            for name, at in (("exchange", 1), ("local", 2), ("merge", 4)):
                found[name].append((times[at] - times[at - 1]) * 1e6)
    return found


def merge_plan(mine: Ranges, theirs: Ranges, spans: list[Span]) -> MergePlan:
    """Return the merge of rows of decodes: first the own parts, then those of the creditor."""
    parts: list[list[PartRows]] = [[] for _ in spans]
    at = 0
    for side in (mine, theirs):
        for own, ranges in zip(parts, side, strict=True):
            for begin, end in ranges:
                own.append(PartRows(begin, end, at))
                at += 1
    return MergePlan(
        [MergedSpan(span.row, span.start, 1, own) for span, own in zip(spans, parts, strict=True)]
    )


def main() -> None:
    """Measure, print the table, publish the JSON."""
    only_save(__doc__)
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    figures: dict[str, Any] = {}
    lines = []
    for dtype in (torch.float32, torch.bfloat16):
        layout = layout_for(dtype)
        region = filled(layout)
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, dtype), daemon=True)
        process.start()
        endpoints = pipe.recv()
        for endpoint in endpoints:
            debtor = RemoteAttention(identity("debtor"), AttentionShape.of(layout, HEADS))
            kind = endpoint.partition(":")[0].replace("unix", "shm")
            for keys in KEYS:
                for rows in ROWS:
                    debtor.connect(CREDITOR, [endpoint], 1)  # with an estimate of its own
                    with torch.inference_mode():
                        times = measure(debtor, region.pool, layout, rows, keys)
                    estimate = debtor.estimate(CREDITOR)
                    computed = estimate.s_per_row_key * rows * keys * 1e6
                    some = {name: spread(values) for name, values in times.items()}
                    name = f"{str(dtype).split('.')[1]} {kind} {keys} keys {rows} rows"
                    figures[name] = {**some, "creditor": round(computed, 3)}
                    medians = [some[what]["median"] for what in ("exchange", "local", "merge")]
                    over = medians[0] - computed
                    row = (medians[0], computed, over, *medians[1:])
                    lines.append([name, *(f"{value:.0f}" for value in row)])
            debtor.close()
        pipe.close()
        process.join(10)
        process.kill()
    table(
        f"a layer of attention over a creditor's pool, µs, medians of {REPEATS}",
        ["", "exchange", "of it computed", "the rest", "local", "merge"],
        lines,
    )
    publish("remote_attention", {"us_per_layer": figures})


if __name__ == "__main__":
    main()
