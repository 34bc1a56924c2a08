"""Table 3 of the microserving paper on real engines: a layer's computation and its put.

Purpose: a transfer costs nothing as long as a layer's put is shorter than the computation of the
next layer. The paper gives both times per layer for prompts of which 500 tokens are new, and the
put's share of the computation: 15.8, 38.3 and 55.4 % for 1000, 3000 and 5000 tokens.

Theory: the put grows with all tokens. The computation grows only with attention over them. So the
share grows with the length, until the put is the longer one.

How: SmolLM2 in bfloat16 on two engines with a core each, called as a router calls them. The context
is cached on the sender. Per length and repeat, with new tokens each time:

- `compute_ms`: time to the first token on the sender alone, over the number of layers;
- `put_ms`: a `remote_send` of the same prompt when the sender has all of it cached, over the number
  of layers. It includes the call;
- `hidden`: 1 - E / T. T is the time of that send. E is how long a send that computes the new tokens
  goes on after its last layer;
- `nixl_ms`: NIXL's WRITE of one layer of as many tokens into another process over shared memory, as
  `bench.put` measures it. A page's part of a layer is one run, and pages are scattered.
  `nixl_transfer_ms` leaves out the preparation of its descriptors.

Run: `make bench-layers`, or `python -m bench.layers [--save] [--repeats 5]`. Without NIXL's
environment (`make peers`) its figures are left out.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
from typing import Any

from bench.deployment import deployed
from bench.engine_calls import Engine, send, tokens, unused_id
from bench.put import nixl
from bench.report import publish, spread, table

FLAGS = ("smollm2", "--engines", "2", "--dtype", "bfloat16", "--pool-pages", "2048")
NEW, INPUTS = 500, (1000, 3000, 5000)
LAYERS, PAGE = 30, 16
RUN_BYTES = PAGE * 2 * 3 * 64 * 2  # K and V of a page's tokens in one layer
PAGES = 800  # of each of NIXL's pools
TRANSFERS = 15


def main() -> None:
    """Measure, print the table, publish the JSON."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--save", action="store_true")
    given = options.parse_args()
    samples: dict[int, list[dict[str, float]]] = {length: [] for length in INPUTS}
    with deployed(*FLAGS) as deployment:
        engines = zip(deployment.engines, deployment.pids[1:], strict=True)
        pair = [Engine(url, pid, deployment.engine_key) for url, pid in engines]
        for engine in pair:
            engine.generate(tokens(100), 4)  # warm
        turns = itertools.cycle((pair, pair[::-1]))
        for one, other in itertools.islice(turns, given.repeats):
            for length, found in samples.items():
                found.append(measure(one, other, length))
    layers = {length: summary(found) | over_nixl(length) for length, found in samples.items()}
    show(layers)
    publish("layers", {
        "engines": FLAGS, "repeats": given.repeats, "load_average": os.getloadavg(),
        "layers": layers,
    })  # fmt: skip


def measure(sender: Engine, receiver: Engine, length: int) -> dict[str, float]:
    """Return the times of a prompt whose context is cached on the sender."""
    context = tokens(length - NEW)
    sender.generate(context, 1)
    compute_ms = sender.generate(context + tokens(NEW), 1)[0]
    prompt = context + tokens(NEW)
    replies = []
    for _ in range(2):  # it computes, then has everything cached
        lease, sent = send(sender, receiver, unused_id(), prompt, length // PAGE * PAGE)
        receiver.call("release", lease_id=lease["lease_id"])
        replies.append(sent)
    computing, cached = replies
    if not 0 < computing["computed_tokens"] <= NEW + PAGE or cached["computed_tokens"]:
        raise SystemExit(f"not cached as it should be: {replies}")
    return {
        "compute_ms": compute_ms / LAYERS,
        "put_ms": cached["ms"] / LAYERS,
        "share": cached["ms"] / compute_ms,
        "hidden": max(0.0, 1 - computing["put_ms"] / cached["ms"]),
    }


def summary(samples: list[dict[str, float]]) -> dict[str, Any]:
    return {name: spread([sample[name] for sample in samples]) for name in samples[0]}


def over_nixl(length: int) -> dict[str, Any]:
    """Return the times of NIXL's transfer of one layer (ms)."""
    pages = -(-length // PAGE)
    source = random.Random(length)
    of, to = (source.sample(range(PAGES), pages) for _ in range(2))
    runs = [
        [a * LAYERS * RUN_BYTES, b * LAYERS * RUN_BYTES, RUN_BYTES]
        for a, b in zip(of, to, strict=True)
    ]
    with nixl(PAGES * LAYERS * RUN_BYTES, runs) as transfer:
        if transfer is None:
            return {}
        times = [transfer() for _ in range(TRANSFERS + 1)][1:]
    return {
        "nixl_ms": spread([1e3 * total for total, _ in times]),
        "nixl_transfer_ms": spread([1e3 * transferred for _, transferred in times]),
    }


def show(layers: dict[int, dict[str, Any]]) -> None:
    names = ("compute_ms", "put_ms", "nixl_ms", "nixl_transfer_ms", "share", "hidden")
    rows = [
        [str(length), *(f"{found[name]['median']:.3f}" if name in found else "" for name in names)]
        for length, found in layers.items()
    ]
    table(f"{NEW} tokens new, per layer, medians", ["tokens", *names], rows)


if __name__ == "__main__":
    main()
