"""An engine process on a GPU over HTTP: what remains of `bench.gpu`'s steps for its clients.

How: an engine with a Llama-3.2-1B of random weights in bfloat16, all flags at their defaults but
`--token-budget 2048`; B streams of 256 tokens behind prompts of 1000, and single prompts, measured
by the client of `bench.engine`: tokens per second, and their rate of one stream as ms per token.

Run: `python -m bench.gpu_served [--save]`, on a machine with a GPU.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench import engine as measured
from bench.engine import Decode, Server
from bench.gpu import card
from bench.gpu_engine import SHAPES
from bench.processes import free_port, running, stopped_server
from bench.random_model import random_folder
from bench.report import only_save, publish, spread, table

REPEATS = 3
BATCHES, PROMPTS = (1, 8, 32, 128), (1024, 4096)


def main() -> None:
    """Measure, print the table, publish the JSON."""
    only_save(__doc__)
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu_served needs a GPU")
    measured.DECODES.clear()
    measured.DECODES.update({f"decode_b{n}": Decode(n, 1000, tokens=256) for n in BATCHES})
    measured.PREFILLS.clear()
    measured.PREFILLS.update({f"prefill_{n}": n for n in PROMPTS})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        random_folder(SHAPES["1b"], Path(folder), torch.device("cuda"))
        torch.cuda.empty_cache()
        found = serve(folder)
    publish("gpu_served", {"card": card(), "repeats": REPEATS, **found})


def serve(folder: str) -> dict[str, Any]:
    """Start the engine and measure it."""
    port = free_port()
    command = [
        sys.executable, "-m", "engine", folder, "--port", str(port), "--device", "cuda",
        "--token-budget", "2048", "--log-level", "info",
    ]  # fmt: skip
    figures: dict[str, list[float]] = {}
    url = f"http://127.0.0.1:{port}"
    with stopped_server(command, url, env=os.environ, within_s=120) as process:
        server = Server("ours", process, url, "/microserving/start_generate")
        with running(process):
            asyncio.run(measured.warm_up(server))
            for repeat in range(REPEATS):
                for name in (*measured.DECODES, *measured.PREFILLS):
                    figure = asyncio.run(measured.measure(server, name, repeat))
                    figures.setdefault(name, []).append(figure)
            step, model = asyncio.run(measured.seconds(server))
    found = {name: spread(values, 0) for name, values in figures.items()}
    rows = []
    for name, row in found.items():
        batch = measured.DECODES[name].batch if name in measured.DECODES else 0
        each = f"{batch / row['median'] * 1e3:.2f}" if batch else ""
        rows.append([name, f"{row['median']:.0f}", each])
    table("over HTTP", ["", "tokens/s", "ms per token and stream"], rows)
    return {"tokens_per_second": found, "model_share": round(model / step, 3)}


if __name__ == "__main__":
    main()
