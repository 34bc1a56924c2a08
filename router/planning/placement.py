"""DistServe's placements (Zhong et al. 2024, algorithms 1 and 2), for any goodput function.

Each ranks by goodput per GPU; equal ones go to fewer GPUs. `Choice` has their choice, and what
serves a given rate on the fewest GPUs. Algorithm 1 as printed compares
both phases through one variable; here each phase has its own best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

from engine.protocol import BadRequest
from router.planning.instances import Division

__all__ = [
    "Choice",
    "Pair",
    "Placement",
    "Rated",
    "high_affinity",
    "low_affinity",
    "most_rate",
    "node_pairs",
]

ROUNDING = 1e-9  # so that a rate of exactly n instances takes n


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode instance whose parts share nodes (DistServe's low affinity).

    Each pipeline has `inter` segments. A node holds a segment of both, divided as `prefill` and
    `decode` say, so KV stays within nodes.
    """

    inter: int
    prefill: Division
    decode: Division

    @property
    def gpus(self) -> int:
        """GPUs of both instances."""
        return self.inter * (self.prefill.gpus + self.decode.gpus)

    @property
    def whole_prefill(self) -> Division:
        """The prefill instance, over all segments."""
        return Division(self.prefill.tp, self.prefill.pp * self.inter)

    @property
    def whole_decode(self) -> Division:
        """The decode instance, over all segments."""
        return Division(self.decode.tp, self.decode.pp * self.inter)

    def __str__(self) -> str:
        return f"prefill {self.whole_prefill}, decode {self.whole_decode}, {self.inter} node(s)"


@dataclass(frozen=True, slots=True)
class Rated:
    """A candidate and its goodput (requests/s)."""

    candidate: Division | Pair
    goodput: float

    @property
    def per_gpu(self) -> float:
        """Goodput per GPU."""
        return self.goodput / self.candidate.gpus

    def instances(self, rate: float) -> int:
        """Return how many serve the rate, if the goodput is above 0."""
        return max(1, ceil(rate / self.goodput - ROUNDING))

    def gpus(self, rate: float) -> int:
        """Return the GPUs of these."""
        return self.instances(rate) * self.candidate.gpus


@dataclass(frozen=True, slots=True)
class Choice:
    """What serves a rate. `ranked` has all candidates, the one with most goodput per GPU first."""

    rate: float
    ranked: tuple[Rated, ...]

    @property
    def best(self) -> Rated:
        """The candidate with most goodput per GPU, which DistServe's algorithms choose."""
        return self.ranked[0]

    @property
    def fewest(self) -> Rated:
        """The candidate that serves the rate on the fewest GPUs; of equals, the better one.

        At a rate of few instances it may be another than `best`, whose last instance is then mostly
        idle.
        """
        return min(
            (rated for rated in self.ranked if rated.goodput > 0),
            key=lambda rated: rated.gpus(self.rate),
        )

    @property
    def count(self) -> int:
        """Instances of `fewest` that serve the rate."""
        return self.fewest.instances(self.rate)

    @property
    def gpus(self) -> int:
        """GPUs of these."""
        return self.fewest.gpus(self.rate)


@dataclass(frozen=True, slots=True)
class Placement:
    """Algorithm 1's answer: instances for prefill and for decode."""

    prefill: Choice
    decode: Choice

    @property
    def gpus(self) -> int:
        """GPUs of all instances."""
        return self.prefill.gpus + self.decode.gpus


def high_affinity(
    divisions: Iterable[Division],
    prefill_goodput: Callable[[Division], float],
    decode_goodput: Callable[[Division], float],
    rate: float,
) -> Placement:
    """Place prefill and decode apart, each by its own goodput alone (algorithm 1).

    Raises: `BadRequest` if no division has a goodput above 0 in one of the phases.
    """
    candidates = list(divisions)
    return Placement(
        _choose("prefill", candidates, prefill_goodput, rate),
        _choose("decode", candidates, decode_goodput, rate),
    )


def low_affinity(
    pairs: Iterable[Pair], joint_goodput: Callable[[Pair], float], rate: float
) -> Choice:
    """Place pairs of prefill and decode by their goodput together (algorithm 2).

    Raises: `BadRequest` if no pair has a goodput above 0.
    """
    return _choose("prefill and decode together", list(pairs), joint_goodput, rate)


def node_pairs(fitting: Iterable[Division], *, nodes: int, gpus_per_node: int) -> list[Pair]:
    """Return the pairs of algorithm 2 whose segments fit in a node and whose wholes fit at all.

    Raises: `BadRequest`, which says how many GPUs a node lacks, if there are none.
    """
    whole = set(fitting)
    segments = [
        (inter, Division(division.tp, division.pp // inter))
        for inter in range(1, nodes + 1)
        for division in sorted(whole)
        if division.pp % inter == 0
    ]
    pairs = [
        Pair(inter, prefill, decode)
        for inter, prefill in segments
        for other, decode in segments
        if inter == other
    ]
    found = [pair for pair in pairs if pair.gpus <= gpus_per_node * pair.inter]
    if not found:
        least = min(pairs, key=lambda pair: (pair.gpus / pair.inter, pair.gpus))
        raise BadRequest(
            f"GPUs: prefill and decode together need {least.gpus // least.inter} GPUs of a node "
            f"({least}), and a node has {gpus_per_node}"
        )
    return found


def most_rate(placement: Placement | Choice, gpus: int) -> float:
    """Return the highest rate that the best candidates serve on so many GPUs."""
    if isinstance(placement, Choice):
        best = placement.best
        return gpus // best.candidate.gpus * best.goodput
    prefill, decode = placement.prefill.best, placement.decode.best
    return max(
        (
            min(n * prefill.goodput, left // decode.candidate.gpus * decode.goodput)
            for n in range(1, gpus // prefill.candidate.gpus + 1)
            for left in [gpus - n * prefill.candidate.gpus]
        ),
        default=0.0,
    )


def _choose(
    phase: str,
    candidates: list[Division] | list[Pair],
    goodput: Callable[..., float],
    rate: float,
) -> Choice:
    rated = [Rated(candidate, goodput(candidate)) for candidate in candidates]
    ranked = sorted(rated, key=lambda each: (-_rounded(each.per_gpu), each.candidate.gpus))
    if not ranked or ranked[0].goodput <= 0:
        raise BadRequest(
            f"{phase}: not one of {len(ranked)} candidates meets the objectives, even without load"
        )
    return Choice(rate, tuple(ranked))


def _rounded(number: float) -> float:
    """Return nine digits, so that rounding errors do not decide between equals."""
    return float(f"{number:.9g}")
