"""What a virtual engine generates: tokens that depend on the request and the position alone."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

__all__ = ["VOCAB", "output_state", "output_tokens", "tokens_from"]

VOCAB = 1000
# The range of random prompts: every vocabulary has these ids, and none of them ends an output.
FIRST_ID, IDS = 10, 290
TAIL = 64  # tokens of the prompt that the output depends on, beside its length
STRIDE = 101  # has no factor in common with IDS


def output_state(tokens: Sequence[int], prompt_len: int, seed: int, choice: int) -> int:
    """Return what `tokens_from` continues: `tokens[:prompt_len]`, the seed and the choice."""
    tail = array("q", tokens[max(0, prompt_len - TAIL) : prompt_len]).tobytes()
    return zlib.crc32(b"%d/%d/%d" % (prompt_len, seed, choice), zlib.crc32(tail))


def tokens_from(state: int, begin: int, end: int) -> list[int]:
    """Return tokens `[begin, end)` of an output."""
    first = state + STRIDE * begin
    return [FIRST_ID + at % IDS for at in range(first, first + STRIDE * (end - begin), STRIDE)]


def output_tokens(
    prompt: Sequence[int], count: int, *, seed: int = 0, choice: int = 0
) -> list[int]:
    """Return the first `count` tokens of the output after `prompt`: the same on every engine."""
    return tokens_from(output_state(prompt, len(prompt), seed, choice), 0, count)
