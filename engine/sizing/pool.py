"""The size of a KV pool, where the user does not choose it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol import BadRequest
from engine.sizing.memory import Memory

__all__ = ["PoolSize", "choose_device_pool", "choose_pool"]

POOL_SHARE = 0.1  # of the memory limit, for the pools of all engines that share it
MAX_POOL_BYTES = 4 << 30  # where `MIN_CONTEXTS` do not need more
# A prompt of full length that another engine computes needs a lease of at most half of the pool.
MIN_CONTEXTS = 2
AVAILABLE_SHARE = 0.5  # of the available memory, at most: weights and activations need some, too
MIN_PAGES = 8
DEVICE_SHARE = 0.9  # of the free memory of a GPU: activations, graphs and libraries need the rest
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PoolSize:
    """Pages of a pool, without the scratch page, and why they are so many."""

    pages: int
    reason: str


def choose_pool(
    *, page_bytes: int, context_pages: int, sequences: int, memory: Memory, share: float
) -> PoolSize:
    """Choose the pages of a pool.

    `context_pages` are the pages of one sequence of the longest context, and `sequences` run at a
    time at most. This engine gets `share` of the memory that the engines of one start divide.

    Raises: `BadRequest` if not even `MIN_PAGES` fit the available memory.
    """
    limit = f"{_size(memory.limit)} ({memory.source})"
    pages = int(min(memory.limit * POOL_SHARE * share, MAX_POOL_BYTES)) // page_bytes
    reason = f"{POOL_SHARE * share:.1%} of {limit}, at most {MAX_POOL_BYTES >> 30} GiB"
    if pages < MIN_CONTEXTS * context_pages:
        pages, reason = MIN_CONTEXTS * context_pages, f"{MIN_CONTEXTS} contexts of full length"
    most = max(sequences, MIN_CONTEXTS) * context_pages
    if pages > most:
        pages, reason = most, f"all that {sequences} sequences of full length can use"
    room = int(memory.available * AVAILABLE_SHARE * share) // page_bytes
    if pages > room:
        part = f"{AVAILABLE_SHARE * share:.1%} of the available {_size(memory.available)}"
        pages, reason = room, f"{part}; the limit is {limit}"
        if pages < MIN_PAGES:
            raise BadRequest(
                f"{_size(memory.available)} of memory are available, too little for a KV pool: "
                f"the limit is {limit}",
                param="pool_pages",
            )
    return PoolSize(pages, reason)


def choose_device_pool(
    *, page_bytes: int, context_pages: int, sequences: int, memory: Memory, share: float
) -> PoolSize:
    """Choose the pages of a pool in the memory of a GPU, once the weights are there.

    `memory` is the GPU's; the other arguments and the error are as of `choose_pool`.
    """
    part = DEVICE_SHARE * share
    pages = int(memory.available * part) // page_bytes
    reason = f"{part:.0%} of the free {_size(memory.available)} of {memory.source}"
    most = max(sequences, MIN_CONTEXTS) * context_pages
    if pages > most:
        pages, reason = most, f"all that {sequences} sequences of full length can use"
    if pages < MIN_PAGES:
        raise BadRequest(
            f"{_size(memory.available)} of {_size(memory.limit)} are free on {memory.source}, too "
            "little for a KV pool",
            param="pool_pages",
        )
    return PoolSize(pages, reason)


def _size(amount: int) -> str:
    return f"{amount / GIB:.1f} GiB" if amount >= GIB else f"{amount >> 20} MiB"
