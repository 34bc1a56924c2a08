"""What the parts of an engine reach on a GPU, as shares of that GPU's own limits.

Purpose: on a GPU a decode is limited by the memory's bandwidth, and a prefill by the matrix units.
An engine can be judged by its share of these limits, without a peer beside it. KV moves between
engines of one card as a copy within its memory.

How: a Llama of random weights in bfloat16, with this project's runner, cache, attention and
transport, in one process without HTTP. The limits are measured first, on the same card.

- `limits`: a copy of 4 GiB within the memory, bytes read and written; a product of two square
  matrices of 8192, in bfloat16, of random numbers.
- `decode`: a step of B sequences of C tokens. `step_ms` is by the clock, with planning, the wait
  for the device and the choice of tokens; `gpu_ms` is the graph alone. `of_bandwidth` is the bytes
  of weights and KV that a step must read, over `gpu_ms`, over the copy's bandwidth;
  `step_of_bandwidth` is the same of `step_ms`. `eager_ms` is a step without graphs.
- `prefill`: a prompt in one step, and its share of the product's rate.
- `puts`, `layers`, `migration`: between this process and another one with a pool on the same card
  (`bench.gpu_puts`): bandwidth beside one copy of as many bytes; the microserving paper's Table 3
  (a layer's computation and its put) and Figure 12 (migration against computing again).

Run: `python -m bench.gpu [--save] [--shapes 1b 8b]`, on a machine with a GPU.
"""

from __future__ import annotations

import argparse
import gc
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from bench.gpu_engine import Parts, copy_ms, gpu_ms, page_bytes, wall_ms
from bench.gpu_puts import Receiver, layers, migration, puts
from bench.report import publish, table
from engine.latency import padded_rows
from engine.scheduling import Chunk

BATCHES, CONTEXTS, PREFILLS = (1, 8, 32, 128), (1024, 8192), (512, 2048, 8192)
STEPS = 15
FREE = 6 << 30  # bytes that are left to activations, graphs and the other process
COPIED, SQUARE = 4 << 30, 8192


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--save", action="store_true")
    options.add_argument("--shapes", nargs="+", default=["1b", "8b"])
    given = options.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu needs a GPU")
    found: dict[str, Any] = {"card": card(), "limits": limits()}
    for shape in given.shapes:
        found[shape] = measure(shape, found["limits"])
        gc.collect()  # graphs and pool, before the next shape takes its own
        torch.cuda.empty_cache()
    publish("gpu", found)


def card() -> dict[str, str]:
    """Return the card, its driver and the versions of what runs on it."""
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    name, driver, memory = subprocess.check_output(asked, text=True).splitlines()[0].split(", ")
    found = {"name": name, "driver": driver, "memory": memory, "cuda": str(torch.version.cuda)}
    for package in ("torch", "triton", "flashinfer-python", "cuda-bindings"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def limits() -> dict[str, float]:
    """Measure the bandwidth of the memory (GB/s) and the rate of the matrix units (TFLOP/s)."""
    copy = copy_ms(COPIED)
    a, b = (torch.randn(SQUARE, SQUARE, device="cuda", dtype=torch.bfloat16) for _ in "ab")
    product = gpu_ms(lambda: a @ b, 20)
    found = {
        "gb_s": round(2 * COPIED / copy / 1e6, 1),
        "tflop_s": round(2 * SQUARE**3 / product / 1e9, 1),
    }
    table("limits", ["", "GB/s", "TFLOP/s"], [["measured", *map(str, found.values())]])
    return found


def measure(shape: str, limit: dict[str, float]) -> dict[str, Any]:
    """Measure everything with a model of one shape."""
    free, _ = torch.cuda.mem_get_info()
    weights = 20 << 30 if shape == "8b" else 4 << 30
    room = max(BATCHES) * (max(CONTEXTS) + 128) // 16
    pages = min((free - FREE - weights) // page_bytes(shape), room)
    parts = Parts(shape, pages, graph_rows=max(BATCHES), context=max(CONTEXTS) + 64)
    found: dict[str, Any] = {
        "weights": parts.weights,
        "pool_tokens": pages * 16,
        "capture_s": round(parts.capture_s, 2),
        "decode": decode(parts, limit),
        "prefill": prefill(parts, limit),
    }
    receiver = Receiver(shape)
    try:
        found |= {
            "puts": puts(parts, receiver),
            "layers": layers(parts, receiver),
            "migration": migration(parts, receiver),
        }
    finally:
        receiver.close()
        parts.cache.close()
    return found


def decode(parts: Parts, limit: dict[str, float]) -> list[dict[str, Any]]:
    """Measure steps of decodes."""
    found: list[dict[str, Any]] = []
    token = parts.layout.held.layers * parts.layout.token_bytes
    for context in CONTEXTS:
        for batch in BATCHES:
            if batch * (context // 16 + 4) >= parts.layout.pages:
                continue  # the pool does not hold them
            names = [parts.sequence(context, 48) for _ in range(batch)]
            chunks = [Chunk(name, [7], True) for name in names]
            step = wall_ms(lambda: parts.run(chunks), STEPS)  # noqa: B023
            graphs, segments = parts.runner._graphs, parts.runner._segments
            parts.runner._graphs = parts.runner._segments = None
            eager = wall_ms(lambda: parts.run(chunks), 3, warm=1)  # noqa: B023
            parts.runner._graphs, parts.runner._segments = graphs, segments
            parts.run(chunks)
            alone = step
            if graphs is not None:
                alone = gpu_ms(graphs._captured[padded_rows(batch, 1)].graph.replay, STEPS)
            parts.remove(names)
            read = 2 * parts.read + batch * context * token
            found.append(
                {
                    "batch": batch,
                    "context": context,
                    "step_ms": step,
                    "gpu_ms": alone,
                    "eager_ms": eager,
                    "tokens_s": round(batch / step * 1e3, 1),
                    "of_bandwidth": round(read / alone / 1e6 / limit["gb_s"], 3),
                    "step_of_bandwidth": round(read / step / 1e6 / limit["gb_s"], 3),
                }
            )
            print(found[-1], flush=True)
    columns = ("batch", "context", "step_ms", "gpu_ms", "eager_ms", "tokens_s", "of_bandwidth")
    rows = [[str(row[name]) for name in columns] for row in found]
    table("decodes", list(columns), rows)
    return found


def prefill(parts: Parts, limit: dict[str, float]) -> list[dict[str, Any]]:
    """Measure prompts, each in one step."""
    found: list[dict[str, Any]] = []
    of = parts.config
    products = parts.read - of.vocab_size * of.hidden_size  # the head computes one row
    for length in PREFILLS:

        def run(length: int = length) -> None:
            name = parts.sequence(0, length)
            parts.run([Chunk(name, [7] * length, True)])
            parts.remove([name])

        taken = wall_ms(run, 7)
        attention = 2 * of.num_layers * of.num_heads * of.head_dim * length * length
        work = 2 * products * length + attention
        found.append(
            {
                "tokens": length,
                "ms": taken,
                "tokens_s": round(length / taken * 1e3),
                "of_products": round(work / taken / 1e9 / limit["tflop_s"], 3),
            }
        )
    rows = [[str(value) for value in row.values()] for row in found]
    table("prefills", ["tokens", "ms", "tokens/s", "of the product's rate"], rows)
    return found


if __name__ == "__main__":
    main()
