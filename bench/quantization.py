"""What int8 weights cost in accuracy, and what they save in time and memory.

Purpose: `--quantization int8` is an option whose accuracy should be known before it is chosen.

Theory: a decode step of few sequences reads every weight once, so half the bytes take half the
time. With many rows the products are bound by arithmetic; int8 weights are multiplied in bfloat16
(activations are not quantized), so they only add the work of conversion. The error of an int8
weight is at most half a scale, 1/254 of the largest weight in its row.

How: the text is the language reference that Python has for its `help()`: the first 1024 tokens of
its four longest topics, through SmolLM2 in float32, bfloat16 and int8, 512 rows a step (as in a
prefill) and 8 (as decodes: other kernels):

- `nll`: mean negative log-likelihood of a token given what comes before it, nats;
  `nll_vs_float32`: mean and standard error of the difference, token by token;
- `top1_vs_float32`: the share of tokens where the most likely next one is float32's.

The model's file holds 4-bit weights (Q4_1), so float32 here means their dequantized values. The
bench measures the error that int8 adds, not the loss by the 4 bits.

Then whole steps of the engine, model and logits: of 1 to 32 decodes at 128 tokens, and of a prefill
chunk of 512, the three alternating, medians of `REPEATS` in ms. Memory: the growth (`RssAnon`) of a
process that loads only the model, and the bytes of the weights.

Run: `make bench-quantization`, or `python -m bench.quantization [--save]`.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer

from bench.report import only_save, publish, spread, table
from engine.execution.forward.model_runner import ModelRunner
from engine.models import LoadedModel, load_model
from engine.models.loading.load import Quantization
from engine.scheduling.chunk import Chunk
from kvcache.cache import KVCache
from kvcache.lease.identity import Identity
from kvcache.memory.layout import KVLayout
from kvcache.page_store.torch_store import TorchPageStore
from kvcache.transport import MemoryNetwork, MemoryTransport
from kvcache.types import EngineId, SeqId

MODEL = "smollm2"
KINDS: dict[str, tuple[torch.dtype, Quantization]] = {
    "float32": (torch.float32, "none"),
    "bfloat16": (torch.bfloat16, "none"),
    "int8": (torch.bfloat16, "int8"),
}
WINDOWS, WINDOW = 4, 1024
# Kinds and rows per step; the others are compared with the first.
RUNS = [("float32", 512), ("bfloat16", 512), ("bfloat16", 8), ("int8", 512), ("int8", 8)]
DECODES, CONTEXT, PREFILL = (1, 4, 8, 32), 128, 512
REPEATS = 15
PAGES = 1024


def main() -> None:
    """Measure, print the tables, publish the JSON."""
    only_save(__doc__)
    # One process for each kind, started before this one has loaded a model.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as processes:
        held = dict(zip(KINDS, processes.map(memory, KINDS), strict=True))
    engines = {kind: Engine(kind) for kind in KINDS}
    windows, digest = text(engines["float32"].model.tokenizer_json)
    accurate = {
        f"{kind}, {rows} rows": found.figures()
        for (kind, rows), found in accuracy(engines, windows).items()
    }
    taken = {
        step: {kind: spread(values) for kind, values in by_kind.items()}
        for step, by_kind in steps(engines).items()
    }
    table(
        f"{MODEL} on {sum(map(len, windows))} tokens",
        ["", "nll", "perplexity", "nll vs float32", "±", "top 1 as float32"],
        [
            [
                name,
                f"{of['nll']:.4f}",
                f"{of['perplexity']:.3f}",
                f"{of['nll_vs_float32']['mean']:.4f}",
                f"{of['nll_vs_float32']['stderr']:.4f}",
                f"{100 * of['top1_vs_float32']:.1f} %",
            ]
            for name, of in accurate.items()
        ],
    )
    table(
        f"ms a step, medians of {REPEATS}",
        ["", *KINDS],
        [
            [step, *(f"{by_kind[kind]['median']:.1f}" for kind in KINDS)]
            for step, by_kind in taken.items()
        ],
    )
    table(
        "MiB",
        ["", *KINDS],
        [[what, *(f"{held[kind][what]:.0f}" for kind in KINDS)] for what in ("weights", "process")],
    )
    publish(
        "quantization",
        {
            "model": MODEL,
            "text_digest": digest,
            "accuracy": accurate,
            "step_ms": taken,
            "memory_mib": held,
        },
    )


class Engine:
    """One kind of weights, and a cache to run it on."""

    def __init__(self, kind: str) -> None:
        self.model = load(kind)
        shape = self.model.config
        layout = KVLayout(
            shape.num_layers, PAGES, 16, shape.num_kv_heads, shape.head_dim, KINDS[kind][0]
        )
        transport = MemoryTransport(MemoryNetwork(), 1)
        self.cache = KVCache(
            TorchPageStore.on(transport, layout, query_heads=shape.num_heads),
            transport,
            identity=Identity(EngineId(kind), 1, b"bench", kind),
        )
        self.runner = ModelRunner(self.model, self.cache)

    def step(self, sequences: int, tokens: int) -> float:
        """Return the seconds of a step that runs `tokens` more of each sequence and samples one."""
        chunks = []
        for number in range(sequences):
            seq_id = SeqId(number)
            self.cache.grow(seq_id, self.cache.length(seq_id) + tokens)
            chunks.append(Chunk(seq_id, range(1000, 1000 + tokens), sample=True))
        began = time.perf_counter()
        self.runner.run(chunks)
        return time.perf_counter() - began

    @torch.inference_mode()
    def logits(self, tokens: list[int], rows: int) -> torch.Tensor:
        """Return logits `[len(tokens), vocab]` of a sequence, computed `rows` per step."""
        transformer, seq_id, parts = self.model.transformer, SeqId(0), []
        if transformer is None:
            raise SystemExit(f"{MODEL} has no weights")
        self.cache.add_sequence(seq_id)
        for begin in range(0, len(tokens), rows):
            part = tokens[begin : begin + rows]
            self.cache.grow(seq_id, begin + len(part))
            self.cache.begin_forward([seq_id], [len(part)])
            positions = torch.arange(begin, begin + len(part))
            hidden = transformer(torch.tensor(part), positions, self.cache)
            self.cache.end_forward()
            parts.append(transformer.logits(hidden))
        self.cache.remove_sequence(seq_id)
        return torch.cat(parts)


@dataclass(slots=True)
class Accuracy:
    """The accuracy of one kind at a number of rows per step, token by token."""

    nll: list[float] = field(default_factory=list)
    beyond: list[float] = field(default_factory=list)  # float32's nll
    same: list[bool] = field(default_factory=list)  # whether the most likely token is float32's

    def figures(self) -> dict[str, Any]:
        error = statistics.stdev(self.beyond) / len(self.beyond) ** 0.5
        mean = statistics.fmean(self.nll)
        return {
            "nll": round(mean, 4),
            "perplexity": round(float(torch.tensor(mean).exp()), 3),
            "nll_vs_float32": {
                "mean": round(statistics.fmean(self.beyond), 5), "stderr": round(error, 5),
            },
            "top1_vs_float32": round(statistics.fmean(self.same), 4),
        }  # fmt: skip


def load(kind: str, model: str = MODEL) -> LoadedModel:
    """Return the model with weights of that kind."""
    dtype, quantization = KINDS[kind]
    return load_model(model, dtype=dtype, device=torch.device("cpu"), quantization=quantization)


def text(tokenizer_json: str) -> tuple[list[list[int]], str]:
    """Return the windows as token ids, and a digest of them."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    longest = sorted(topics.values(), key=len, reverse=True)[:WINDOWS]
    windows = [tokenizer.encode(topic).ids[:WINDOW] for topic in longest]
    return windows, hashlib.sha256(repr(windows).encode()).hexdigest()[:16]


def accuracy(
    engines: dict[str, Engine], windows: list[list[int]]
) -> dict[tuple[str, int], Accuracy]:
    """Return the accuracy of each kind and number of rows per step."""
    found = {run: Accuracy() for run in RUNS}
    for window in windows:
        targets = torch.tensor(window[1:])
        reference = None
        for (kind, rows), figures in found.items():
            logits = engines[kind].logits(window, rows)[:-1]
            nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
            best = logits.argmax(-1)
            if reference is None:
                reference = nll, best
            figures.nll += nll.tolist()
            figures.beyond += (nll - reference[0]).tolist()
            figures.same += (best == reference[1]).tolist()
    return found


def steps(engines: dict[str, Engine]) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of steps by workload and kind; the kinds alternate."""
    taken: dict[str, dict[str, list[float]]] = {}
    for count in DECODES:
        for engine in engines.values():
            for number in range(count):
                engine.cache.add_sequence(SeqId(number))
            engine.step(count, CONTEXT)
        by_kind = taken.setdefault(f"decode_{count}", {kind: [] for kind in engines})
        for repeat in range(REPEATS + 1):
            for kind, engine in engines.items():
                seconds = engine.step(count, 1)
                if repeat:
                    by_kind[kind].append(1e3 * seconds)
        for engine in engines.values():
            for number in range(count):
                engine.cache.remove_sequence(SeqId(number))
    by_kind = taken.setdefault(f"prefill_{PREFILL}", {kind: [] for kind in engines})
    for repeat in range(REPEATS + 1):
        for kind, engine in engines.items():
            engine.cache.add_sequence(SeqId(0))
            seconds = engine.step(1, PREFILL)
            engine.cache.remove_sequence(SeqId(0))
            if repeat:
                by_kind[kind].append(1e3 * seconds)
    return taken


def memory(kind: str) -> dict[str, float]:
    """Return the MiB of the weights, and the growth of this process when it loads them."""
    load(kind, "tiny")  # imports and compiles everything first
    before = anonymous()
    model = load(kind)
    grown = anonymous() - before
    if model.transformer is None:
        raise SystemExit(f"{MODEL} has no weights")
    weights = sum(weight.numel() * weight.itemsize for weight in model.transformer.parameters())
    return {"process": round(grown / 2**20, 1), "weights": round(weights / 2**20, 1)}


def anonymous() -> int:
    """Return the bytes of this process's resident anonymous memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(line for line in lines if line.startswith("RssAnon:"))
    return int(resident.split()[1]) << 10


if __name__ == "__main__":
    main()
