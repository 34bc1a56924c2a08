"""Gumbel noise over a vocabulary: a function of (seed, choice, position) and the token alone.

It can be asked for at any token without computing the others. Gumbel is g = −ln x of an exponential
x, so the largest of all is that of the clock which rings first. Tokens are dealt to groups. Of n
exponential clocks the first rings after x₁/n, whichever it is, and, since they have no memory, each
other one a further x of its own later. So one hash gives a group's largest noise and whose it is;
the rest is computed for tokens that may still win.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

__all__ = ["GROUPS", "Gumbel"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

GROUPS = 2048  # more cost more hashes, fewer leave more tokens to look at
MASK = 2**64 - 1
STEP = 0x9E3779B97F4A7C15  # splitmix64's
TOKENS = 2**32  # where the tokens' numbers begin; before them are the groups'


class Gumbel:
    """The noise of some draws, each a (seed, choice, position) and over `vocab` tokens.

    Token t is in group t mod GROUPS. All groups have as many `members`; the last of some is no
    token.
    """

    def __init__(self, draws: Iterable[tuple[int, int, int]], vocab: int) -> None:
        """Choices are below 2³¹, positions below 2³²."""
        self.members = -(-vocab // GROUPS)
        keys = [
            _mixed(_mixed(seed) + (choice << 32 | position)) for seed, choice, position in draws
        ]
        self._keys = np.array(keys, dtype=np.uint64)
        self._hashes = _hashed(self._keys[:, None], np.arange(GROUPS, dtype=np.uint64))

    def most(self) -> Floats:
        """The largest noise in each group: `[draws, GROUPS]`."""
        return _gumbel(self._first(self._hashes))

    def at(self, draws: Ints, tokens: Ints) -> Floats:
        """That of some tokens in some draws, of shapes that fit."""
        groups = tokens % GROUPS
        hashes = self._hashes[draws, groups]
        # Of a group's hash the upper half is the time, and the lower one says whose it is.
        first = ((hashes & (2**32 - 1)) * self.members >> 32).astype(np.int64)
        later = _exponential(_hashed(self._keys[draws], tokens.astype(np.uint64) + TOKENS))
        later[tokens // GROUPS == first] = 0.0
        return _gumbel(self._first(hashes) + later)

    def _first(self, hashes: Words) -> Floats:
        return _exponential(hashes) / self.members


def _mixed(word: int) -> int:
    """splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    word = (word ^ (word & MASK) >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def _hashed(keys: Words, numbers: Words) -> Words:
    """The streams of splitmix64 that begin at some keys, at some numbers."""
    words = keys + numbers * STEP
    words ^= words >> 30
    words *= 0xBF58476D1CE4E5B9
    words ^= words >> 27
    words *= 0x94D049BB133111EB
    words ^= words >> 31
    return words


def _exponential(hashes: Words) -> Floats:
    """Of rate 1, from the upper 32 bits."""
    uniform = (hashes >> 32).astype(np.float64)
    uniform += 0.5  # so that neither 0 nor 1 comes
    uniform *= 2.0**-32
    return -np.log(uniform)


def _gumbel(exponential: Floats) -> Floats:
    return -np.log(exponential)
