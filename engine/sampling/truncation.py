"""What min_p, top_k and top_p leave of a batch: of each row, the logits from a certain one on."""

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

WIDTHS = (1024, 8192)  # tokens among which top_k and top_p look first, before they look among all


def least_logits(rows: Rows, top: Logits, samplings: Sequence[Sampling]) -> Floats:
    """The least logit that min_p, top_k and top_p leave, in this order: `[rows, 1]`.

    `top` is the largest of each row, `[rows, 1]`. That one always stays; of equals all do, or none.
    Temperatures come before the filters, and are above 0.
    """
    vocab = rows.shape[1]
    least = np.full(top.shape, -np.inf)
    ranked = []
    for n, sampling in enumerate(samplings):
        if sampling.min_p > 0.0:  # p ≥ min_p · max p, in logits
            least[n] = top[n] + sampling.temperature * np.log(sampling.min_p)
        if 0 < sampling.top_k < vocab or sampling.top_p < 1.0:
            ranked.append(n)
    for width in (*(width for width in WIDTHS if width < vocab), vocab):
        if ranked:
            chosen = [samplings[n] for n in ranked]
            least[ranked], sure = _among_largest(
                width, rows, ranked, top[ranked], least[ranked], chosen
            )
            ranked = [n for n, known in zip(ranked, sure, strict=True) if not known]
    return least


def _among_largest(
    width: int,
    rows: Rows,
    some: Sequence[int],
    top: Logits,
    least: Floats,
    samplings: Sequence[Sampling],
) -> tuple[Floats, Flags]:
    """What top_k and top_p make of some rows' `least`, as far as a row's `width` largest logits
    tell, and `[len(some)]` whether they do; `least` is as it was where not."""
    vocab = rows.shape[1]
    temperature = np.array([[one.temperature] for one in samplings])
    top_p = np.array([[one.top_p] for one in samplings])
    top_k = np.array([[one.top_k if one.top_k < vocab else 0] for one in samplings])
    values = rows.largest(some, width)
    kth = np.take_along_axis(values, np.clip(top_k - 1, 0, width - 1), 1)
    kept = np.where(top_k > 0, np.maximum(kth, least), least)
    # Probabilities of what is kept so far, as multiples of the likeliest token's.
    with np.errstate(invalid="ignore"):  # of a row in which nothing is left
        relative = np.exp((values - top) / temperature)
    relative[values < kept] = 0.0
    upto = relative.cumsum(-1)
    total = upto[:, -1:].copy()
    if width < vocab:  # where some that are kept may not be among the largest
        beyond = (kept <= values[:, -1:]) & (top_p < 1.0)
        for n in np.flatnonzero(beyond).tolist():
            total[n] = rows.total(some[n], samplings[n].temperature, float(kept[n, 0]))
    before = (upto < top_p * total).sum(-1, keepdims=True)  # the nucleus needs one more than these
    last = np.take_along_axis(values, before.clip(max=width - 1), 1)
    found = np.where(top_p < 1.0, last, kept)
    sure = (top_k <= width) & ((before < width) | (top_p == 1.0))
    return np.where(sure, found, least), sure[:, 0]
