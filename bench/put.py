"""How fast KV reaches a peer's pool, against memcpy and against NIXL.

Purpose: a put should cost what its bytes cost. One process owns a pool and leases pages; this one
maps it and puts the KV of 3000 tokens into the lease, the way `remote_send` does for a cached
prefix: page tables, write right, claim and watermark included, on the one thread that puts run on.

Theory: the limit is one `memcpy` of the same bytes between the same two mappings. Contiguous pages
can approach it. Scattered ones (each 16-token page elsewhere, on both sides) pay for a run a page,
24 KiB in float32, the engines' default, and 12 KiB in bfloat16. NIXL's WRITE over shared memory is
the peer.

Run: `make bench-put`, or `python -m bench.put [--save]`. Alternating, medians of `REPEATS`; the
mappings are touched before. Without the peer's environment (`make peers`) its ratio is null.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import random
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.report import publish, spread, table
from kvcache.cache import KVCache
from kvcache.identity import Identity
from kvcache.layout import KVLayout
from kvcache.transport import ShmTransport
from kvcache.types import EngineId, SeqId

TOKENS = 3000
LAYERS, PAGE_SIZE, KV_HEADS, HEADS, HEAD_DIM = 30, 16, 3, 9, 64  # SmolLM2's shape
PAGES = 800
REPEATS = 15
PEER = Path(__file__).parent.parent / ".peers" / "nixl" / "bin" / "python"


def make_cache(name: str, epoch: int, dtype: torch.dtype) -> KVCache:
    """A cache whose pool has been written once."""
    layout = KVLayout(LAYERS, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype)
    cache = KVCache(
        layout,
        ShmTransport(layout, epoch),
        query_heads=HEADS,
        identity=Identity(EngineId(name), epoch, b"bench", "bench"),
    )
    cache.pool[:, 1:] = 1.0
    return cache


def scatter(cache: KVCache) -> None:
    """Give the pool's pages out and back in random order, so that none follows its neighbour."""
    ids = [SeqId(10_000 + n) for n in range(cache.page_use().free)]
    for seq_id in ids:
        cache.add_sequence(seq_id)
        cache.grow(seq_id, 1)
    random.Random(0).shuffle(ids)
    for seq_id in ids:
        cache.remove_sequence(seq_id)


def receive(pipe: Connection, dtype: torch.dtype, scattered: bool) -> None:
    """The other process: a lease each time it is asked, released afterwards."""
    cache = make_cache("receiver", 2, dtype)
    if scattered:
        scatter(cache)
    prompt = list(range(TOKENS))
    while True:
        lease, address = cache.prep_recv("bench", prompt, TOKENS, 0, 600.0)
        pipe.send(address)
        if not pipe.recv():
            return
        if cache.lease(lease.lease_id).landed != TOKENS:
            raise SystemExit("the put has not landed")
        cache.release(lease.lease_id)


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(dtype: torch.dtype, scattered: bool) -> tuple[list[float], list[float]]:
    """GB/s of puts and of memcpy, alternating."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    peer = context.Process(target=receive, args=(theirs, dtype, scattered), daemon=True)
    peer.start()
    cache = make_cache("sender", 1, dtype)
    if scattered:
        scatter(cache)
    prompt = list(range(TOKENS))
    sequence = SeqId(1)
    cache.add_sequence(sequence)
    cache.grow(sequence, TOKENS)
    cache._sequence(sequence).length = TOKENS  # as if it had been computed
    size = TOKENS * LAYERS * cache.layout.token_bytes
    put_rates, memcpy_rates = [], []
    for repeat in range(REPEATS + 1):
        put = cache.open_put(ours.recv(), prompt, 0, TOKENS)

        def send(put: Any = put) -> None:
            cache.mark_send(sequence, put, 0, TOKENS)
            put.close().result()

        put_s = seconds(send)
        cache.clear_mark(sequence)
        # The same bytes between the same mappings, one thread: the receiver's pool is mapped here.
        target = next(iter(cache.transport._peers.values()))[2].pool  # type: ignore[attr-defined]
        to, of = target.data_ptr(), cache.pool.data_ptr()
        memcpy_s = seconds(lambda to=to, of=of: ctypes.memmove(to, of, size))
        ours.send(repeat < REPEATS)
        if repeat:
            put_rates.append(size / put_s / 1e9)
            memcpy_rates.append(size / memcpy_s / 1e9)
    peer.join()
    cache.transport.close()
    return put_rates, memcpy_rates


def measure_nixl() -> float | None:
    """GB/s of NIXL's WRITE between two processes over shared memory; None without NIXL."""
    if not PEER.exists():
        return None
    script = Path(__file__).parent / "peer_nixl.py"
    done = subprocess.run([PEER, script], capture_output=True, text=True, timeout=300)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return None
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure, print the table, publish the JSON."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for scattered in (False, True):
            put, memcpy = measure(dtype, scattered)
            name = f"{'scattered' if scattered else 'contiguous'} {str(dtype).split('.')[1]}"
            ratio = spread(put)["median"] / spread(memcpy)["median"]
            figures[name] = {"put": spread(put), "memcpy": spread(memcpy), "ratio": round(ratio, 3)}
            cells = (spread(put)["median"], spread(memcpy)["median"], ratio)
            rows.append([name, *(f"{cell:.2f}" for cell in cells)])
    nixl = measure_nixl()
    rows.append(["NIXL shm, 256 MB", "-" if nixl is None else f"{nixl:.2f}", "-", "-"])
    table(
        f"{TOKENS} tokens of SmolLM2's KV into another process, medians of {REPEATS}",
        ["pages", "put GB/s", "memcpy GB/s", "ratio"],
        rows,
    )
    contiguous = figures["contiguous float32"]
    publish(
        "put",
        {
            "contiguous_vs_memcpy": contiguous["ratio"],
            "scattered_vs_memcpy": figures["scattered float32"]["ratio"],
            "vs_nixl_shm": nixl and round(contiguous["put"]["median"] / nixl, 3),
            "gb_per_s": figures | {"nixl": nixl},
        },
    )


if __name__ == "__main__":
    main()
