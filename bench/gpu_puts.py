"""Puts between two processes on one GPU, beside what they have to hide behind or replace.

As a program, this module is the receiver: it makes a cache, prints the addresses of leases and
ends with its standard input.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch

from bench.gpu_engine import Parts, copy_ms, make_cache, median_ms
from bench.report import table
from engine.scheduling import Chunk
from kvcache.types import LeaseId

__all__ = ["Receiver", "layers", "migration", "puts"]

NEW, INPUTS = 500, (1000, 3000, 5000)
RECEIVED = 5120  # tokens of a lease; the receiver's pool has room for three
TIMES = 7
_ids = itertools.count(1)


class Receiver:
    """A process with a pool on the same GPU."""

    def __init__(self, shape: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu_puts", shape],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def lease(self, prompt: list[int]) -> str:
        """Return the address of a new lease for a prompt; the former lease ends."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(prompt), file=self._process.stdin, flush=True)
        while (line := self._process.stdout.readline()) and not line.startswith("address "):
            pass
        return line.removeprefix("address ").strip()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


def _serve(shape: str) -> None:
    """Be the receiver."""
    device = torch.device("cuda", torch.cuda.current_device())
    cache = make_cache(shape, 3 * RECEIVED // 16 + 1, "there", device)
    last: LeaseId | None = None
    for line in sys.stdin:
        if last is not None:
            cache.release(last)
        prompt = json.loads(line)
        lease, address = cache.prep_recv(f"r{next(_ids)}", prompt, len(prompt), 0, 600.0)
        last = lease.lease_id
        print("address", address, flush=True)
    cache.close()


def new_prompt(length: int) -> list[int]:
    """Return tokens that nothing has cached."""
    source = random.Random(next(_ids))
    return [source.randrange(100_000) for _ in range(length)]


def puts(parts: Parts, receiver: Receiver) -> dict[str, Any]:
    """Measure puts of `RECEIVED` tokens: whole pages, and layer by layer."""
    size = parts.layout.held.layers * parts.layout.layer_bytes // 16 * RECEIVED
    found: dict[str, Any] = {"bytes": size, "copy_gb_s": round(size / copy_ms(size) / 1e6, 1)}
    for name in ("pages", "layers"):
        samples, copied = [], []
        for _ in range(TIMES + 1):
            taken, put_s = _put(parts, receiver, RECEIVED, by_layer=name == "layers")
            samples.append(taken)
            copied.append(put_s)
        found[name] = {
            "ms": median_ms(samples[1:]),
            "gb_s": round(size / median_ms(samples[1:]) / 1e6, 1),
            "copying_gb_s": round(size / median_ms(copied[1:]) / 1e6, 1),
        }
        found[name]["of_copy"] = round(found[name]["gb_s"] / found["copy_gb_s"], 3)
    rows = [
        [name, f"{found[name]['ms']:.3f}", f"{found[name]['gb_s']}", f"{found[name]['of_copy']}"]
        for name in ("pages", "layers")
    ]
    table(
        f"puts of {size >> 20} MiB; one copy within the card: {found['copy_gb_s']} GB/s",
        ["put", "ms", "GB/s", "of the copy"], rows,
    )  # fmt: skip
    return found


def _put(
    parts: Parts, receiver: Receiver, length: int, *, by_layer: bool = False
) -> tuple[float, float]:
    """Put `length` tokens that are present; return the seconds of all, and of the copies."""
    prompt = new_prompt(length)
    address = receiver.lease(prompt)
    name = parts.sequence(length, 0)
    put = parts.cache.open_put(address, prompt, 0, length)
    torch.cuda.synchronize()
    began = time.perf_counter()
    if by_layer:
        pages = np.array(parts.cache._sequences[name].table.ids)
        for layer in range(parts.config.num_layers):
            put.write(range(layer, layer + 1), pages, 0, length)  # type: ignore[arg-type]
        put.signal(length)  # type: ignore[arg-type]
    else:
        parts.cache.mark_send(name, put, 0, length)
    put.close().result(60)
    taken = time.perf_counter() - began
    parts.cache.clear_mark(name)
    parts.remove([name])
    return taken, put.copy_s


def layers(parts: Parts, receiver: Receiver) -> dict[str, Any]:
    """Measure Table 3: a layer's computation of `NEW` tokens, and a layer's put of all tokens."""
    count = parts.config.num_layers
    found: dict[str, Any] = {}
    for length in INPUTS:
        compute, send, ends = [], [], []
        for _ in range(TIMES + 1):
            compute.append(_compute(parts, length - NEW, NEW))
            send.append(_put(parts, receiver, length)[0])
            ends.append(_computed_send(parts, receiver, length))
        whole = median_ms(send[1:])
        end = median_ms(ends[1:])
        found[str(length)] = {
            "compute_ms": round(median_ms(compute[1:]) / count, 4),
            "put_ms": round(whole / count, 4),
            "share": round(whole / median_ms(compute[1:]), 4),
            "end_ms": end,
            "puts_ms": [round(taken * 1e3, 3) for taken in send[1:]],
            "hidden": round(1 - end / whole, 3),
        }
    rows = [
        [length, *(f"{row[name]}" for name in ("compute_ms", "put_ms", "share", "hidden"))]
        for length, row in found.items()
    ]
    table(
        "Table 3, per layer", ["tokens", "computation ms", "put ms", "put / computation", "hidden"],
        rows,
    )  # fmt: skip
    return found


def _compute(parts: Parts, cached: int, new: int) -> float:
    """Return the seconds of computing `new` tokens behind `cached` ones."""
    name = parts.sequence(cached, new)
    prompt = new_prompt(new)
    began = time.perf_counter()
    parts.run([Chunk(name, prompt, True)])
    taken = time.perf_counter() - began
    parts.remove([name])
    return taken


def _computed_send(parts: Parts, receiver: Receiver, length: int) -> float:
    """Send a prompt while its last `NEW` tokens are computed.

    Return the seconds from the end of the computation to that of the send.
    """
    prompt = new_prompt(length)
    address = receiver.lease(prompt)
    name = parts.sequence(length - NEW, NEW)
    put = parts.cache.open_put(address, prompt, 0, length)
    parts.cache.mark_send(name, put, 0, length)
    parts.runner.run([Chunk(name, prompt[length - NEW :], False)])
    began = time.perf_counter()
    put.close().result(60)
    taken = time.perf_counter() - began
    parts.cache.clear_mark(name)
    parts.remove([name])
    return taken


def migration(parts: Parts, receiver: Receiver) -> dict[str, Any]:
    """Measure Figure 12: all of a prompt computed, or all but `NEW` tokens put by the owner."""
    found: dict[str, Any] = {}
    for length in INPUTS:
        recompute, migrate = [], []
        for _ in range(TIMES + 1):
            recompute.append(_compute(parts, 0, length))
            put = _put(parts, receiver, length - NEW)[0]
            migrate.append(put + _compute(parts, length - NEW, NEW))
        found[str(length)] = {
            "recompute_ms": median_ms(recompute[1:]),
            "migrate_ms": median_ms(migrate[1:]),
            "ratio": round(median_ms(recompute[1:]) / median_ms(migrate[1:]), 2),
        }
    rows = [
        [length, *(f"{row[name]}" for name in ("recompute_ms", "migrate_ms", "ratio"))]
        for length, row in found.items()
    ]
    table("Figure 12", ["tokens", "computed ms", "migrated ms", "ratio"], rows)
    return found


if __name__ == "__main__":
    _serve(sys.argv[1])
