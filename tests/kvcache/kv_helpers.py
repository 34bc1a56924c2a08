"""Helpers for tests of the KV cache: small caches, a clock that tests set, and recognizable KV.

The KV that these tests write is a function of (layer, position, token), so that the KV put into a
peer can be compared with the expected KV bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from kvcache.cache import KVCache
from kvcache.lease.identity import Identity
from kvcache.memory.layout import KVLayout
from kvcache.page_store.torch_store import TorchPageStore
from kvcache.tiers.store import TierStore
from kvcache.transport import MemoryNetwork, MemoryTransport, Transport
from kvcache.types import EngineId, SeqId

LAYERS, SIZE, KV_HEADS, HEADS, DIM = 2, 4, 2, 4, 8


class Clock:
    """A clock that advances when the test sets `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class HeldUpCopies:
    """Copies into peers' memory that have `reached` their first byte wait until `released`."""

    def __init__(self) -> None:
        self.reached, self.released = threading.Event(), threading.Event()


def small_layout(pages: int, page_size: int = SIZE) -> KVLayout:
    """Return a layout of `pages` pages beside the scratch page."""
    return KVLayout(LAYERS, pages + 1, page_size, KV_HEADS, DIM, torch.float32)


def make_cache(
    transport: Transport,
    layout: KVLayout,
    *,
    name: str = "a",
    epoch: int = 1,
    secret: bytes = b"secret",
    fingerprint: str = "same",
    clock: Callable[[], float] | None = None,
    stores: Sequence[TierStore] = (),
    lend_pages: int = 0,
    loan_s: float = 30.0,
) -> KVCache:
    return KVCache(
        TorchPageStore.on(transport, layout, query_heads=HEADS),
        transport,
        identity=Identity(EngineId(name), epoch, secret, fingerprint),
        clock=clock or Clock(),
        tier_stores=stores,
        lend_pages=lend_pages,
        loan_s=loan_s,
    )


def memory_cache(network: MemoryNetwork, pages: int = 32, **options: object) -> KVCache:
    layout = small_layout(pages)
    epoch = int(str(options.get("epoch", 1)))
    return make_cache(MemoryTransport(network, epoch), layout, **options)  # type: ignore[arg-type]


def kv_of(tokens: Sequence[int], layer: int, start: int = 0) -> torch.Tensor:
    """Return keys and values of tokens from `start`, `[len(tokens), 2, KV_HEADS, DIM]`."""
    positions = torch.arange(start, start + len(tokens))
    base = torch.tensor(list(tokens)) + positions * 0.001 + layer * 0.25
    heads = torch.arange(2 * KV_HEADS * DIM).view(2, KV_HEADS, DIM) * 1e-4
    return (base.view(-1, 1, 1, 1) + heads).float()


def compute(cache: KVCache, seq_id: SeqId, tokens: Sequence[int]) -> None:
    """Compute the sequence's next `tokens` with a model whose KV is `kv_of`."""
    if not tokens:
        return
    start, device = cache.length(seq_id), cache.store.pool.device
    cache.grow(seq_id, start + len(tokens))
    cache.begin_forward([seq_id], [len(tokens)])
    for layer in range(LAYERS):
        kv = kv_of(tokens, layer, start).to(device)
        q = torch.zeros(len(tokens), HEADS, DIM, device=device)
        cache.attention(layer, q, kv[:, 0], kv[:, 1])
    cache.end_forward()


def pages_of(cache: KVCache, seq_id: SeqId) -> list[int]:
    return list(cache._sequences[seq_id].pages)


def assert_content(cache: KVCache, seq_id: SeqId, tokens: Sequence[int]) -> None:
    """Check that the sequence's KV is that of `tokens` in all layers."""
    assert cache.length(seq_id) == len(tokens)
    pages = pages_of(cache, seq_id)
    for layer in range(LAYERS):
        held = cache.store.pool[layer, pages].transpose(1, 2).flatten(0, 1)[: len(tokens)]
        assert torch.equal(held.cpu(), kv_of(tokens, layer))


def sequence(cache: KVCache, number: int, tokens: Sequence[int]) -> SeqId:
    """Return a new sequence with the KV of `tokens`; cached pages are not computed."""
    seq_id = SeqId(number)
    cached = cache.add_sequence(seq_id, tokens)
    if cached < len(tokens):
        compute(cache, seq_id, tokens[cached:])
    return seq_id


def cached(cache: KVCache, number: int, tokens: Sequence[int]) -> None:
    """Put the full pages of `tokens` into the prefix cache."""
    seq_id = sequence(cache, number, tokens)
    cache.publish(seq_id, tokens)
    cache.remove_sequence(seq_id)


def send(
    sender: KVCache, address: str, prompt: Sequence[int], begin: int, end: int, chunk: int = 1000
) -> None:
    """Make a whole remote send: claim, compute and put in chunks, and wait for its end."""
    put = sender.open_put(address, prompt, begin, end)
    seq_id = SeqId(1_000_000)
    here = sender.add_sequence(seq_id, prompt[:end])
    sender.mark_send(seq_id, put, begin, end)
    try:
        while here < end:
            step = prompt[here : min(here + chunk, end)]
            compute(sender, seq_id, step)
            here += len(step)
    finally:
        error = put.close().exception(timeout=10)
        sender.clear_mark(seq_id)
        sender.remove_sequence(seq_id)
    if error is not None:
        raise error
