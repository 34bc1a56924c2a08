"""Prompts of made-up tokens. Their names determine them: equal names mean equal tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from hashlib import shake_128

from router.workload.request import LoadRequest

__all__ = [
    "BlockTokens",
    "hashed_blocks",
    "named_tokens",
    "prompt_of_blocks",
    "spelled_blocks",
    "synthetic",
]

BlockTokens = Callable[[str, int], bytes]  # from a block's name and size to its token ids

# Token ids of made-up prompts. Every vocabulary has them, and they are not special in our models.
# They fit into bytes, so a prompt of 3000 tokens takes 20 µs of a core.
FIRST_ID, IDS = 10, 240
TOKEN_OF_BYTE = bytes(FIRST_ID + byte % IDS for byte in range(256))


def named_tokens(name: str, count: int) -> bytes:
    """Return `count` token ids, a byte each. A shorter result begins a longer one of that name."""
    return shake_128(name.encode()).digest(count).translate(TOKEN_OF_BYTE)


def hashed_blocks(seed: int) -> BlockTokens:
    """Return the tokens of blocks with any names."""
    return lambda name, count: named_tokens(f"{seed} {name}", count)


def spelled_blocks(seed: int) -> BlockTokens:
    """Return the tokens of blocks whose names are hexadecimal digits, a digit for each token.

    A page of 16 tokens costs a fifth of what hashing its name costs.
    """
    tokens = random.Random(seed).sample(range(FIRST_ID, FIRST_ID + IDS), 16)
    token_of_digit = bytes.maketrans(b"0123456789abcdef", bytes(tokens))

    def spell(name: str, count: int) -> bytes:
        digits = name if count <= len(name) else name * (count // len(name) + 1)
        return digits[:count].encode().translate(token_of_digit)

    return spell


def prompt_of_blocks(
    blocks: Iterable[str], block_tokens: float, length: int, tokens: BlockTokens, rest: str
) -> list[int]:
    """Return a prompt of `length` tokens that begins with the blocks of these names.

    Each has `block_tokens` tokens; where this is no whole number, blocks begin at the nearest
    token. The name `rest` determines the tokens beyond the blocks.
    """
    parts, end = [], 0
    for number, name in enumerate(blocks, start=1):
        begin, end = end, min(round(number * block_tokens), length)
        parts.append(tokens(name, end - begin))
    parts.append(named_tokens(rest, length - end))
    return list(b"".join(parts))


def synthetic(name: str, inputs: Iterator[int], outputs: Iterator[int]) -> Iterator[LoadRequest]:
    """Yield requests of these lengths. Their prompts share nothing; `name` determines them."""
    for number, (tokens, most) in enumerate(zip(inputs, outputs, strict=False)):
        prompt = list(named_tokens(f"{name} {number}", tokens))
        yield LoadRequest({"prompt": prompt, "max_tokens": most}, tokens)
