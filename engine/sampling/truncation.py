"""Truncation by min_p, top_k and top_p: each row keeps the logits at or above a threshold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.protocol import Sampling
from engine.sampling.logits import Rows

__all__ = ["least_logits"]

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

WIDTHS = (1024, 8192)  # top_k and top_p search so many top tokens, then all


def least_logits(rows: Rows, top: Logits, samplings: Sequence[Sampling]) -> Floats:
    """Return the least logit that passes min_p, top_k and top_p, in this order, `[rows, 1]`.

    `top` is the largest logit of each row, `[rows, 1]`; it always passes. Equal logits pass or fail
    together. The temperature is applied before the filters and is above 0.
    """
    vocab = rows.shape[1]
    least = np.full(top.shape, -np.inf)
    ranked = []
    for n, sampling in enumerate(samplings):
        if sampling.min_p > 0.0:  # p ≥ min_p · max p, in terms of logits
            least[n] = top[n] + sampling.temperature * np.log(sampling.min_p)
        if 0 < sampling.top_k < vocab or sampling.top_p < 1.0:
            ranked.append(n)
    for width in (*(width for width in WIDTHS if width < vocab), vocab):
        if ranked:
            chosen = [samplings[n] for n in ranked]
            least[ranked], resolved = _least_of_largest(
                width, rows, ranked, top[ranked], least[ranked], chosen
            )
            ranked = [n for n, known in zip(ranked, resolved, strict=True) if not known]
    return least


def _least_of_largest(
    width: int,
    rows: Rows,
    selected: Sequence[int],
    top: Logits,
    least: Floats,
    samplings: Sequence[Sampling],
) -> tuple[Floats, Flags]:
    """Apply top_k and top_p to those `selected` rows whose top `width` logits suffice for it.

    Returns the new `least` and whether each row is resolved, `[len(selected)]`. For a row that is
    not resolved, `least` is unchanged.
    """
    vocab = rows.shape[1]
    temperature = np.array([[one.temperature] for one in samplings])
    top_p = np.array([[one.top_p] for one in samplings])
    top_k = np.array([[one.top_k if one.top_k < vocab else 0] for one in samplings])
    values = rows.largest(selected, width)
    kth = np.take_along_axis(values, np.clip(top_k - 1, 0, width - 1), 1)
    kept = np.where(top_k > 0, np.maximum(kth, least), least)
    # Probabilities of the tokens kept so far, relative to the most probable token.
    with np.errstate(invalid="ignore"):  # -inf - -inf, in a row without allowed tokens
        relative = np.exp((values - top) / temperature)
    relative[values < kept] = 0.0
    cumulative = relative.cumsum(-1)
    total = cumulative[:, -1:].copy()
    if width < vocab:  # kept tokens may lie beyond the top `width`
        beyond = (kept <= values[:, -1:]) & (top_p < 1.0)
        for n in np.flatnonzero(beyond).tolist():
            total[n] = rows.exp_sum(selected[n], samplings[n].temperature, float(kept[n, 0]))
    # The nucleus is these tokens and one more.
    before = (cumulative < top_p * total).sum(-1, keepdims=True)
    last = np.take_along_axis(values, before.clip(max=width - 1), 1)
    found = np.where(top_p < 1.0, last, kept)
    resolved = (top_k <= width) & (before < width)
    return np.where(resolved, found, least), resolved[:, 0]
