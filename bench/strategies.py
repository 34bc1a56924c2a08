"""One request at a time under each strategy: time to the first token, per token, and in all.

Purpose: see what disaggregation costs, and gains, where nothing else runs: with one request in the
system, `prefill_decode` can at best equal a single engine, and its KV transfer shows in the time to
first token. `balanced` shares a prefill between two engines, one after the other.

Theory: two engines on two cores, one thread each, are two devices. A strategy's time to first token
is prefill + transfer (hidden behind the layers that are still being computed) + one decode step.

Run: `make bench-strategies`, or `python -m bench.strategies [--save]`. Strategies alternate, each
prompt is fresh (cold caches), medians of `REPEATS` with the spread. The load generator and the
router share the cores with the engines.
"""

from __future__ import annotations

import random
import time
from typing import Any

import httpx

from bench.deployment import Deployment, deployed
from bench.report import only_save, publish, spread, table

MODEL = "smollm2"
PROMPT_TOKENS = 1000
NEW_TOKENS = 24
REPEATS = 5
STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("data_parallel", {}),
    ("prefill_decode", {}),
    ("balanced", {"ratio": 0.1}),
    ("balanced", {"ratio": 0.5}),
]


def main() -> None:
    """Measure, print the table, publish the JSON."""
    only_save(__doc__)
    with deployed(MODEL, "--engines", "2", "--dtype", "float32") as deployment:
        results = measure(deployment)
    rows = []
    for name, figures in results.items():
        cells = [f"{figures[k]['median']:.1f}" for k in ("ttft_ms", "tpot_ms", "jct_ms")]
        low, high = figures["ttft_ms"]["min"], figures["ttft_ms"]["max"]
        rows.append([name, *cells, f"{low:.0f}-{high:.0f}"])
    table(
        f"{PROMPT_TOKENS} in / {NEW_TOKENS} out, {MODEL} float32, medians of {REPEATS}",
        ["strategy", "TTFT ms", "TPOT ms", "JCT ms", "TTFT spread"],
        rows,
    )
    single = results["data_parallel"]["ttft_ms"]["median"]
    split = results["prefill_decode"]["ttft_ms"]["median"]
    publish(
        "strategies",
        {"strategies": results, "ttft_1p1d_vs_single": round(split / single, 4)},
    )


def measure(deployment: Deployment) -> dict[str, dict[str, dict[str, float]]]:
    """Each strategy `REPEATS` times, in turn, after one warm-up round."""
    samples: dict[str, list[tuple[float, float, float]]] = {}
    with httpx.Client(base_url=deployment.url, timeout=300) as client:
        for repeat in range(REPEATS + 1):
            for name, params in STRATEGIES:
                deployment.use(name, **params)
                times = one(client, random.Random(f"{repeat}{name}{params}"))
                label = " ".join([name, *(str(value) for value in params.values())])
                if repeat:
                    samples.setdefault(label, []).append(times)
    return {
        label: {
            key: spread([1000 * sample[index] for sample in taken])
            for index, key in enumerate(("ttft_ms", "tpot_ms", "jct_ms"))
        }
        for label, taken in samples.items()
    }


def one(client: httpx.Client, source: random.Random) -> tuple[float, float, float]:
    """Seconds to the first token, per further token, and in all."""
    body = {
        "model": MODEL,
        "prompt": [source.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    began = time.perf_counter()
    first = None
    with client.stream("POST", "/v1/completions", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {") and first is None:
                first = time.perf_counter() - began
    total = time.perf_counter() - began
    if first is None:
        raise SystemExit("no token came")
    return first, (total - first) / (NEW_TOKENS - 1), total


if __name__ == "__main__":
    main()
