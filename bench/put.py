"""How fast KV reaches a peer's pool, against memcpy and against NIXL.

Purpose: a put should cost what its bytes cost. One process owns a pool and leases pages; this one
maps it and puts the KV of 3000 tokens into the lease, the way `remote_send` does for a cached
prefix: page tables, write right, claim and watermark included, on the one thread that puts run on.
A put of one token, as a mirror does it, should cost little more than waking that thread.

Theory: the limit is one `memcpy` of the same bytes between the same two mappings. Contiguous pages
can approach it; so can scattered ones (each 16-token page elsewhere, on both sides), since a page's
layers lie together: 720 KiB in float32, the engines' default. KV that is put layer by layer during
its computation is one run of 24 KiB per page and layer: plain copies of such runs reach 0.6 of
memcpy here, because each starts cold. NIXL's WRITE over shared memory is the peer; it is stopped
between its measurements, because its threads spin. It moves the same runs: `vs_nixl_shm` compares
contiguous pages, `vs_nixl_shm_scattered` scattered ones. Both are measured from the page tables, or
the array of runs, to the last byte; NIXL's transfer without the preparation of its descriptors is
given too. Within a host NIXL copies through the kernel (`process_vm_writev`); if that is more than
half as fast as memcpy, no thread can be twice as fast as NIXL, and the best possible ratio is below
2.

Run: `make bench-put`, or `python -m bench.put [--save]`. Alternating, medians of `REPEATS`; the
mappings are touched before. Without the peer's environment (`make peers`) its ratios are null.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from bench.report import only_save, publish, spread, table
from kvcache.cache import KVCache
from kvcache.lease.address import KVAddress
from kvcache.lease.identity import Identity
from kvcache.memory.layout import KVLayout
from kvcache.memory.region import SharedRegion
from kvcache.page_store.torch_store import TorchPageStore
from kvcache.transport import ShmTransport
from kvcache.transport.runs import Route
from kvcache.types import EngineId, SeqId

TOKENS = 3000
LAYERS, PAGE_SIZE, KV_HEADS, HEADS, HEAD_DIM = 30, 16, 3, 9, 64  # SmolLM2's shape
PAGES = 800
REPEATS = 15
SINGLES = 300  # one-token puts
SECRET = b"bench"
PEER = Path(__file__).parent.parent / ".peers" / "nixl" / "bin" / "python"
PEER_SAYS = "peer:"
SEQUENCE = SeqId(1)
PROMPT = list(range(TOKENS))


@dataclass
class Rates:
    """The GB/s of each repeat."""

    put: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    nixl: list[float] = field(default_factory=list)
    nixl_transfer: list[float] = field(default_factory=list)


def make_cache(name: str, epoch: int, dtype: torch.dtype, scattered: bool) -> KVCache:
    """Return a cache whose pool has been written once; `scattered` shuffles its free pages."""
    layout = KVLayout(LAYERS, PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype)
    identity = Identity(EngineId(name), epoch, SECRET, "bench")
    transport = ShmTransport(epoch)
    store = TorchPageStore.on(transport, layout, query_heads=HEADS)
    cache = KVCache(store, transport, identity=identity)
    store.pool[:, 1:] = 1.0
    if scattered:
        scatter(cache)
    return cache


def scatter(cache: KVCache) -> None:
    """Take the pool's pages and free them in random order, so that none are contiguous."""
    ids = [SeqId(10_000 + n) for n in range(cache.page_use().free)]
    for seq_id in ids:
        cache.add_sequence(seq_id)
        cache.grow(seq_id, 1)
    random.Random(0).shuffle(ids)
    for seq_id in ids:
        cache.remove_sequence(seq_id)


def receive(pipe: Connection, dtype: torch.dtype, scattered: bool) -> None:
    """Run the receiving process: open a lease per request and release it afterwards."""
    cache = make_cache("receiver", 2, dtype, scattered)
    while True:
        lease, address = cache.prep_recv("bench", PROMPT, TOKENS, 0, 600.0)
        pipe.send(address)
        landed = pipe.recv()
        if landed is None:
            return
        if cache.lease(lease.lease_id).landed != landed:
            raise SystemExit("the put has not landed")
        cache.release(lease.lease_id)


class Pair:
    """A sender here, which has a sequence of `TOKENS`, and a receiver in another process."""

    def __init__(self, dtype: torch.dtype, scattered: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=receive, args=(theirs, dtype, scattered), daemon=True)
        self.process.start()
        self.cache = make_cache("sender", 1, dtype, scattered)
        self.cache.add_sequence(SEQUENCE)
        self.cache.grow(SEQUENCE, TOKENS)
        self.cache._sequences[SEQUENCE].length = TOKENS  # set without computing the tokens
        self.pages = self.cache._sequences[SEQUENCE].pages
        self.size = TOKENS * LAYERS * self.cache.layout.token_bytes
        self.address: str = self.pipe.recv()
        self.open()
        self.peer_pool = self._peer().pool  # mapped here
        self.peer_pool[:, 1:] = 1.0

    def _peer(self) -> SharedRegion:
        transport = self.cache.transport
        if not isinstance(transport, ShmTransport):
            raise TypeError("not over shm")
        ((_, region),) = transport._peers.values()
        return region

    def open(self) -> Any:
        return self.cache.open_put(self.address, PROMPT, 0, TOKENS)

    def runs(self) -> list[list[int]]:
        """Return the runs of a put as offsets into the two pools."""
        pages = KVAddress.verify(self.address, SECRET).pages()
        route = Route(self.cache.layout, self._peer().layout, pages, 0)
        batches = route.batches(range(LAYERS), self.pages, 0, TOKENS, self.size)
        return [run for runs, _ in batches for run in runs.tolist()]

    def next(self, landed: int) -> None:
        """Report the landed tokens and get another lease."""
        self.pipe.send(landed)
        self.address = self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()
        self.cache.close()


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(dtype: torch.dtype, scattered: bool, by_layer: bool) -> Rates:
    """Measure puts, memcpy and (except `by_layer`) NIXL alternately."""
    pair, rates = Pair(dtype, scattered), Rates()
    cache, size = pair.cache, pair.size
    to, of = pair.peer_pool.data_ptr(), cache.store.pool.data_ptr()
    with nixl(cache.layout.nbytes, [] if by_layer else pair.runs()) as transfer:
        for repeat in range(REPEATS + 1):
            put = pair.open()

            def send(put: Any = put) -> None:
                if by_layer:
                    for layer in range(LAYERS):
                        put.write(range(layer, layer + 1), pair.pages, 0, TOKENS)
                    put.signal(TOKENS)
                else:
                    cache.mark_send(SEQUENCE, put, 0, TOKENS)
                put.close().result()

            put_s = seconds(send)
            cache.clear_mark(SEQUENCE)
            # The same bytes between the same mappings, one thread.
            memcpy_s = seconds(lambda: ctypes.memmove(to, of, size))
            nixl_s = transfer() if transfer else None
            pair.next(TOKENS)
            if repeat:
                rates.put.append(size / put_s / 1e9)
                rates.memcpy.append(size / memcpy_s / 1e9)
                if nixl_s:
                    rates.nixl.append(size / nixl_s[0] / 1e9)
                    rates.nixl_transfer.append(size / nixl_s[1] / 1e9)
    pair.close()
    return rates


@contextmanager
def nixl(size: int, runs: list[list[int]]) -> Iterator[Callable[[], list[float]] | None]:
    """Yield a function by which NIXL moves the runs; it returns total and transfer seconds."""
    if not PEER.exists() or not runs:
        yield None
        return
    script = [str(PEER), str(Path(__file__).parent / "peer_nixl.py"), str(size)]
    with subprocess.Popen(
        script,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as peer:
        if peer.stdin is None or peer.stdout is None:
            raise TypeError("no pipes")
        stdin, stdout = peer.stdin, peer.stdout

        def ask(line: str) -> str:
            os.killpg(peer.pid, signal.SIGCONT)
            time.sleep(0.02)  # let the process wake up before measuring
            stdin.write(line + "\n")
            stdin.flush()
            while not (answer := stdout.readline()).startswith(PEER_SAYS):
                if not answer:
                    raise SystemExit("NIXL has failed")
            os.killpg(peer.pid, signal.SIGSTOP)
            return answer.removeprefix(PEER_SAYS)

        ask(json.dumps(runs))
        yield lambda: [float(word) for word in ask("go").split()]
        os.killpg(peer.pid, signal.SIGCONT)
        stdin.close()
        if peer.wait():
            raise SystemExit("NIXL has not moved the bytes")


def measure_singles() -> list[float]:
    """Return the microseconds of single-token puts in all layers until they land."""
    pair, times = Pair(torch.float32, scattered=False), []
    put = pair.open()
    for position in range(SINGLES):

        def send(position: int = position) -> None:
            put.write(range(LAYERS), pair.pages, position, position + 1)
            put.signal(position + 1)
            put.close().result()

        times.append(seconds(send) * 1e6)
    pair.next(SINGLES)
    pair.close()
    return times[SINGLES // 10 :]


def ratio(ours: list[float], others: list[float]) -> float | None:
    """Return the ratio of the medians."""
    return round(spread(ours)["median"] / spread(others)["median"], 3) if others else None


def main() -> None:
    """Measure, print the table, publish the JSON."""
    only_save(__doc__)
    torch.set_num_threads(1)
    figures: dict[str, dict[str, Any]] = {}
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for kind in ("contiguous", "scattered", "layer by layer"):
            rates = measure(dtype, kind != "contiguous", kind == "layer by layer")
            name = f"{kind} {str(dtype).split('.')[1]}"
            measured = {what: spread(values) for what, values in vars(rates).items() if values}
            ratios = {
                "vs_memcpy": ratio(rates.put, rates.memcpy),
                "vs_nixl": ratio(rates.put, rates.nixl),
                "vs_nixl_transfer": ratio(rates.put, rates.nixl_transfer),
            }
            figures[name] = {**measured, **ratios}
            cells = [measured.get(what, {}).get("median") for what in vars(rates)]
            row = (*cells, *ratios.values())
            rows.append([name, *("-" if cell is None else f"{cell:.2f}" for cell in row)])
    single = spread(measure_singles())
    table(
        f"{TOKENS} tokens of SmolLM2's KV into another process, GB/s, medians of {REPEATS}",
        ["pages", "put", "memcpy", "NIXL", "its transfer", "vs memcpy", "vs NIXL", "vs transfer"],
        rows,
    )
    print(f"one token in all {LAYERS} layers, µs: {single}")
    contiguous, scattered_pages = figures["contiguous float32"], figures["scattered float32"]
    publish(
        "put",
        {
            "contiguous_vs_memcpy": contiguous["vs_memcpy"],
            "scattered_vs_memcpy": scattered_pages["vs_memcpy"],
            "vs_nixl_shm": contiguous["vs_nixl"],
            "vs_nixl_shm_scattered": scattered_pages["vs_nixl"],
            "one_token_us": single,
            "gb_per_s": figures,
        },
    )


if __name__ == "__main__":
    main()
