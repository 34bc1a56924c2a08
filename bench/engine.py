"""Speed of one engine, against vLLM on the same cores with the same weights.

Purpose: a programmable layer is only worth its cost if the engine below it is as fast as the best.

Theory: at batch 1 a decode step reads all weights once, so memory bandwidth is the limit; at batch
32 and in a prefill the matrix products are. Engines differ in the rest: attention, the sampler,
Python between the kernels, and the output of tokens.

How: SmolLM2-135M in bfloat16 on all cores, one server process each: our engine
(`start_generate`) and vLLM's OpenAI-style server, measured by the same client over HTTP, streamed.
They alternate, `REPEATS` times. The waiting server is stopped (SIGSTOP), because vLLM's threads
spin. Prompts are random token ids, drawn anew each time, so that nothing is cached.

- `decode_bB`: B sequences of 32 tokens of prompt (`_ctx1000`: 1000; `_shared2000`: and before them
  2000 that are the same for all), tokens per second between the last sequence's first token and the
  first sequence's last one, while all B decode; greedy, or `_sampled`: temperature 0.8, top_p 0.95;
- `prefill_N`: N over the time to the first token of a prompt of N tokens, nothing else running.

Every ratio is ours over theirs, medians: more than 1 is faster than vLLM. Of ours alone:

- `overhead_b32`: the share of a step in which the model does not run, while 32 sequences decode;
- `idle_cpu`: cores that the process keeps busy while it has nothing to do, over ten seconds;
- `memory_mib`: the process's private memory after all measurements, without weights and pool.

Run: `make bench-engine`, or `python -m bench.engine [--save]`. Without the peer's environment
(`make peers`) the ratios are null.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch

from bench import peer_vllm
from bench.processes import cpu_s, free_port, running, stopped_server
from bench.report import only_save, publish, spread, table
from bench.streams import post_stream
from engine.models import load_model
from engine.protocol.config import EngineConfig
from kvcache.memory.layout import KVLayout
from router.engines.http_client import HttpClient

MODEL, DTYPE = "smollm2", "bfloat16"
CONTEXT = 4096
REPEATS = 3
START_S = 300.0
POOL_PAGES = 2048
IDLE_S = 10.0
PREFILLS = {"prefill_1024": 1024, "prefill_3000": 3000}


@dataclass(frozen=True, slots=True)
class Decode:
    """A batch of sequences that decode together."""

    batch: int
    prompt: int = 32
    shared: int = 0  # tokens before the prompt, the same for all
    sampled: bool = False
    tokens: int = 128  # of each sequence; enough that all decode together most of the time


DECODES = {
    "decode_b1": Decode(1),
    "decode_b8": Decode(8),
    "decode_b32": Decode(32),
    "decode_b32_sampled": Decode(32, sampled=True),
    "decode_b8_ctx1000": Decode(8, 1000, tokens=1024),
    "decode_b16_shared2000": Decode(16, shared=2000, tokens=256),
}


@dataclass(slots=True)
class Server:
    """One of the two servers: its address, and the format of its requests and events."""

    name: str
    process: subprocess.Popen[bytes]
    url: str
    path: str
    figures: dict[str, list[float]] = field(default_factory=dict)

    def body(self, prompt: list[int], tokens: int, sampled: bool) -> dict[str, Any]:
        """Return a request for exactly `tokens` tokens, greedy or sampled."""
        asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        if sampled:
            asked |= {"temperature": 0.8, "top_p": 0.95, "seed": next(_numbers)}
        if self.name == "ours":
            return {**asked, "request_id": f"bench-{next(_numbers)}", "begin": 0}
        return {**asked, "model": "peer", "stream": True, "return_token_ids": True}

    def token_ids(self, event: dict[str, Any]) -> list[int]:
        """Return the token ids of one event of its stream."""
        ids: list[int] = (event if self.name == "ours" else event["choices"][0])["token_ids"]
        return ids or []

    def turn(self) -> AbstractContextManager[None]:
        """Let this server's processes run during the body, and stop them afterwards."""
        return running(self.process)


_numbers = itertools.count()


def main() -> None:
    """Measure, print the table, publish the JSON."""
    only_save(__doc__)
    overhead: list[float] = []
    with servers() as sides:
        for server in sides:
            with server.turn():
                asyncio.run(warm_up(server))
        for repeat in range(REPEATS):
            for name in (*DECODES, *PREFILLS):
                for server in sides:
                    with server.turn():
                        before = asyncio.run(seconds(server))
                        figure = asyncio.run(measure(server, name, repeat))
                        if server.name == "ours" and name == "decode_b32":
                            step, model = asyncio.run(seconds(server))
                            share = (model - before[1]) / (step - before[0])
                            overhead.append(1.0 - share)
                    server.figures.setdefault(name, []).append(figure)
        with sides[0].turn():
            pid = sides[0].process.pid
            extra = {"idle_cpu": idle(pid), "memory_mib": memory(pid)}
    show(sides, overhead, extra)


async def measure(server: Server, name: str, repeat: int) -> float:
    """Measure one figure in tokens per second."""
    draw = random.Random(f"{name} {repeat}")
    client = HttpClient(server.url)
    try:
        if name in PREFILLS:
            count = PREFILLS[name]
            began = time.perf_counter()
            (first, _), *_ = await _stream(client, server, _prompt(draw, count), 1)
            return count / (first - began)
        load = DECODES[name]
        shared = _prompt(draw, load.shared)
        prompts = [shared + _prompt(draw, load.prompt) for _ in range(load.batch)]
        streams = await asyncio.gather(
            *(_stream(client, server, each, load.tokens, load.sampled) for each in prompts)
        )
    finally:
        client.close()
    begin = max(stream[0][0] for stream in streams)
    end = min(stream[-1][0] for stream in streams)
    if begin >= end:
        raise RuntimeError(f"{server.name}: {name} never decoded all at once")
    tokens = sum(count for stream in streams for at, count in stream if begin < at <= end)
    return tokens / (end - begin)


async def seconds(server: Server) -> tuple[float, float]:
    """Return our engine's seconds in steps, and in the model within them, since its start."""
    if server.name != "ours":
        return 0.0, 0.0
    async with httpx.AsyncClient() as http:
        text = (await http.get(server.url + "/metrics")).text
    step, model = (
        next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))
        for name in ("microserve:step_seconds_total", "microserve:model_seconds_total")
    )
    return step, model


def idle(pid: int) -> float:
    """Return the CPU seconds per second of an idle process."""
    before = cpu_s(pid)
    time.sleep(IDLE_S)
    return round((cpu_s(pid) - before) / IDLE_S, 4)


def memory(pid: int) -> dict[str, int]:
    """Return the anonymous memory of a process by use, and the rest (MiB)."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    resident = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem")) >> 10
    dtype = getattr(torch, DTYPE)
    model = load_model(MODEL, dtype=dtype, device=torch.device("cpu"))
    shape = model.config
    page, pages = EngineConfig.page_size, POOL_PAGES + 1
    layout = KVLayout(shape.num_layers, pages, page, shape.num_kv_heads, shape.head_dim, dtype)
    pool = layout.nbytes >> 20
    if model.transformer is None:
        raise RuntimeError(f"{MODEL} has no weights")
    numbers = sum(weight.numel() for weight in model.transformer.parameters())
    weights = numbers * dtype.itemsize >> 20
    rest = resident - weights - pool
    return {"resident": resident, "weights": weights, "pool": pool, "constant": rest}


async def warm_up(server: Server) -> None:
    """Run everything once that compiles or allocates at first use."""
    for name in (*PREFILLS, *DECODES):
        await measure(server, name, -1)


async def _stream(
    client: HttpClient,
    server: Server,
    prompt: list[int],
    tokens: int,
    sampled: bool = False,
) -> list[tuple[float, int]]:
    """Return arrival times and numbers of tokens. Raises `RuntimeError` for a wrong total."""
    came: list[tuple[float, int]] = []

    def note(event: dict[str, Any], now: float) -> None:
        if count := len(server.token_ids(event)):
            came.append((now, count))

    await post_stream(client, server.path, server.body(prompt, tokens, sampled), note)
    if sum(count for _, count in came) != tokens:
        raise RuntimeError(f"{server.name} sent {sum(c for _, c in came)} tokens, not {tokens}")
    return came


def _prompt(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(1000, 40_000) for _ in range(count)]


@contextmanager
def servers() -> Iterator[list[Server]]:
    """Start our engine and, if it is installed, vLLM. Both are stopped until their turns."""
    with ExitStack() as stack:
        port = free_port()
        engine = [sys.executable, "-m", "engine", MODEL, "--port", str(port), "--dtype", DTYPE]
        pool = ["--pool-pages", str(POOL_PAGES)]
        sides = [stack.enter_context(_started("ours", [*engine, *pool], port))]
        sides[0].path = "/microserving/start_generate"
        if peer_vllm.PYTHON.exists():
            folder = peer_vllm.model_folder(MODEL)
            port = free_port()
            command = peer_vllm.serve(folder, port, CONTEXT)
            sides.append(stack.enter_context(_started("vllm", command, port)))
        yield sides


@contextmanager
def _started(name: str, command: list[str], port: int) -> Iterator[Server]:
    """Start a server, which is stopped until its turn."""
    url, env = f"http://127.0.0.1:{port}", peer_vllm.environment()
    with stopped_server(command, url, env=env, within_s=START_S) as process:
        yield Server(name, process, url, "/v1/completions")


def show(sides: list[Server], overhead: list[float], extra: dict[str, Any]) -> None:
    """Print the table and publish the JSON."""
    ours, theirs = sides[0].figures, sides[1].figures if len(sides) > 1 else {}
    rows, ratios = [], {}
    for name, figures in ours.items():
        mine = statistics.median(figures)
        other = statistics.median(theirs[name]) if theirs else None
        ratios[name] = round(mine / other, 3) if other else None
        rows.append([name, f"{mine:.0f}", f"{other:.0f}" if other else "", str(ratios[name])])
    table(f"{MODEL}, {DTYPE}, tokens per second", ["", "ours", "vLLM", "ratio"], rows)
    publish(
        "engine",
        {
            **ratios,
            "overhead_b32": spread(overhead),
            **extra,
            "tokens_per_second": {
                server.name: {name: spread(values) for name, values in server.figures.items()}
                for server in sides
            },
            "repeats": REPEATS,
        },
    )


if __name__ == "__main__":
    main()
