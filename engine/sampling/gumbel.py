"""Gumbel noise over a vocabulary, as a function of (seed, choice, position) and token alone.

The noise of any token can be computed without the others. Gumbel noise is g = −ln x with x
exponentially distributed, so the largest noise belongs to the smallest x. Tokens are divided into
groups. The minimum of n exponential variables is distributed as x₁/n, whichever of them it is; and,
as they are memoryless, each of the others exceeds the minimum by an exponential variable of its
own. So one hash determines a group's largest noise and the token that has it. The noise of other
tokens is computed only where they may still win.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["GROUPS", "Gumbel"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

GROUPS = 2048  # more groups cost more hashes, fewer leave more candidate tokens
MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15  # increment of splitmix64
TOKENS = 2**32  # offset of tokens in the hash stream; groups precede them


class Gumbel:
    """The noise of a batch of draws, each a (seed, choice, position), over `vocab` tokens.

    Token t is in group t mod GROUPS. All groups have `members` members; in some groups the last
    member is beyond the vocabulary.
    """

    def __init__(self, draws: Iterable[tuple[int, int, int]], vocab: int) -> None:
        """`draws` are (seed, choice, position); choices are below 2³¹, positions below 2³²."""
        self.members = -(-vocab // GROUPS)
        keys = [
            _mixed(_mixed(seed) + (choice << 32 | position)) for seed, choice, position in draws
        ]
        self._keys = np.array(keys, dtype=np.uint64)
        self._hashes = _hashed(self._keys[:, None], np.arange(GROUPS, dtype=np.uint64))

    def group_maxima(self) -> Floats:
        """Return the largest noise in each group, `[draws, GROUPS]`."""
        return _gumbel(self._group_minima(self._hashes))

    def at(self, draws: Ints, tokens: Ints) -> Floats:
        """Return the noise of `tokens` in `draws`, index arrays that broadcast."""
        groups = tokens % GROUPS
        hashes = self._hashes[draws, groups]
        # The upper half of a group's hash gives the minimum, the lower half the member that has it.
        minimal_member = ((hashes & (2**32 - 1)) * self.members >> 32).astype(np.int64)
        excess = _exponential(_hashed(self._keys[draws], tokens.astype(np.uint64) + TOKENS))
        excess[tokens // GROUPS == minimal_member] = 0.0
        return _gumbel(self._group_minima(hashes) + excess)

    def _group_minima(self, hashes: Words) -> Floats:
        return _exponential(hashes) / self.members


def _mixed(word: int) -> int:
    """Apply the finalizer of splitmix64 (Steele, Lea, Flood 2014)."""
    word = (word ^ (word & MASK) >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def _hashed(keys: Words, numbers: Words) -> Words:
    """Return elements `numbers` of the splitmix64 streams with states `keys`."""
    words = keys + numbers * STEP
    words ^= words >> 30
    words *= 0xBF58476D1CE4E5B9
    words ^= words >> 27
    words *= 0x94D049BB133111EB
    words ^= words >> 31
    return words


def _exponential(hashes: Words) -> Floats:
    """Return exponential variables of rate 1, from the upper 32 bits of hashes."""
    uniform = (hashes >> 32).astype(np.float64)
    uniform += 0.5  # excludes 0 and 1
    uniform *= 2.0**-32
    return -np.log(uniform)


def _gumbel(exponential: Floats) -> Floats:
    return -np.log(exponential)
