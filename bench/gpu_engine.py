"""The parts of an engine on a GPU, in this process: a random model, its runner, its cache."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.random_model import llama, random_model
from engine.execution.forward.model_runner import ModelRunner
from engine.scheduling import Chunk
from kvcache.cache import KVCache
from kvcache.lease import Identity
from kvcache.memory import KVLayout
from kvcache.page_store import TorchPageStore
from kvcache.transport import make_transport
from kvcache.types import EngineId, SeqId

__all__ = [
    "SHAPES",
    "Parts",
    "copy_ms",
    "gpu_ms",
    "make_cache",
    "median_ms",
    "page_bytes",
    "wall_ms",
]

PAGE = 16
SECRET, DIGEST = b"bench", "random"
# Llama-3.2-1B and Llama-3.1-8B.
SHAPES = {
    "1b": llama(
        layers=16, hidden=2048, inner=8192, heads=32, kv_heads=8, head_dim=64, vocab=128256
    ),
    "8b": llama(
        layers=32, hidden=4096, inner=14336, heads=32, kv_heads=8, head_dim=128, vocab=128256
    ),
}
_names = itertools.count(1)


def make_cache(
    shape: str, pages: int, name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> KVCache:
    """Return a cache whose pool is on `device`, with keys and values at random."""
    of = SHAPES[shape]
    layout = KVLayout(of.num_layers, pages, PAGE, of.num_kv_heads, of.head_dim, dtype)
    transport = make_transport("auto", 1, secret=SECRET, device=device)
    store = TorchPageStore.on(transport, layout, query_heads=of.num_heads)
    for layer in store.pool[:, 1:]:
        layer.normal_()
    return KVCache(store, transport, identity=Identity(EngineId(name), 1, SECRET, DIGEST))


def page_bytes(shape: str) -> int:
    """Return the bytes of a page of KV of a shape, in all layers."""
    of = SHAPES[shape]
    return KVLayout(of.num_layers, 1, PAGE, of.num_kv_heads, of.head_dim, torch.bfloat16).page_bytes


class Parts:
    """One model with its runner and cache."""

    def __init__(self, shape: str, pages: int, *, graph_rows: int, context: int) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.config = SHAPES[shape]
        model = random_model(self.config, torch.bfloat16, self.device)
        self.weights = sum(w.numel() for w in model.transformer.parameters())  # type: ignore[union-attr]
        # Read in each step: all but the embeddings, of which a row each is looked up.
        self.read = self.weights - self.config.vocab_size * self.config.hidden_size
        self.cache = make_cache(shape, pages, "here", self.device)
        self.layout = self.cache.layout
        began = time.monotonic()
        self.runner = ModelRunner(
            model, self.cache, graph_rows=graph_rows, context=context, prompt_rows=2048
        )
        self.capture_s = time.monotonic() - began

    def sequence(self, length: int, room: int) -> SeqId:
        """Return a new sequence of `length` tokens, whose KV is what the pool has there."""
        name = SeqId(next(_names))
        self.cache.add_sequence(name, [])
        self.cache.grow(name, length + room)
        if length:
            self.cache.begin_forward([name], [length])
            self.cache.end_forward()
        return name

    def run(self, chunks: list[Chunk]) -> Any:
        """Compute a step and take the best tokens, as a greedy engine does."""
        return self.runner.run(chunks).argmax(-1).cpu()

    def remove(self, names: list[SeqId]) -> None:
        """Remove sequences."""
        for name in names:
            self.cache.remove_sequence(name)


def median_ms(samples: list[float]) -> float:
    """Return the median in ms of samples in seconds."""
    return round(statistics.median(samples) * 1e3, 4)


def wall_ms(work: Callable[[], object], times: int, warm: int = 3) -> float:
    """Return the median time of `work`, which waits for the device, by the clock."""
    for _ in range(warm):
        work()
    samples = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        samples.append(time.perf_counter() - began)
    return median_ms(samples)


def gpu_ms(work: Callable[[], object], times: int, warm: int = 3) -> float:
    """Return the median time of `work` on the current stream, by the device's events."""
    for _ in range(warm):
        work()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(times)]  # type: ignore[no-untyped-call]
    for began, ended in events:
        began.record()
        work()
        ended.record()
    torch.cuda.synchronize()
    return median_ms([began.elapsed_time(ended) / 1e3 for began, ended in events])


def copy_ms(size: int) -> float:
    """Return the time of one copy of `size` bytes within the card's memory."""
    one, other = (torch.empty(size // 4, dtype=torch.float32, device="cuda") for _ in range(2))
    one.normal_()
    return gpu_ms(lambda: other.copy_(one), 10)
