"""Sampling of tokens from logits, one batch at a time.

Randomness is a function of (seed, choice, position) alone, never of the engine or the batch, so a
request continues with the same tokens wherever it moves. Tokens are drawn by the Gumbel-max trick,
argmax(logit/T + g). Unlike a search in the cumulative distribution, its result does not depend on
the last bits of the logits.

A row's results have the same bits in any batch. After the operations on whole rows little data is
left, which numpy processes: its calls take less time than torch's, and noise is equal on every
device.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.protocol import BadRequest
from engine.sampling.gumbel import GROUPS, Gumbel
from engine.sampling.logits import Rows, rows_of
from engine.sampling.sampled import Sampled
from engine.sampling.truncation import least_logits
from engine.scheduling import Generation

__all__ = ["sample"]

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SLICES = 8  # of the groups; the most promising group of each gives a lower bound of the maximum
LOWEST = -1e300  # below any score except -inf, which excluded tokens have
SLACK = 1e-12  # the rounding of a logarithm may depend on its place in an array
GREEDY_BELOW = 1e-5  # below this temperature noise cannot matter


@torch.inference_mode()
def sample(logits: Tensor, generations: Sequence[Generation]) -> list[Sampled]:
    """Sample one token for each generation. `logits` is `[len(generations), vocab]` float32.

    A result has a `failure` if the generation's grammar does not accept any token.
    """
    if not generations:
        return []
    rows = rows_of(_adjust(logits, generations))
    stochastic = [
        n for n, one in enumerate(generations) if one.sampling.temperature >= GREEDY_BELOW
    ]
    if len(stochastic) == len(generations):
        tokens = _draw(rows, generations)
    else:
        tokens = rows.argmax()
        if stochastic:
            tokens[stochastic] = _draw(
                rows.select(stochastic), [generations[n] for n in stochastic]
            )
    sampled = [Sampled(token) for token in tokens.tolist()]
    for one, row, result in zip(generations, logits, sampled, strict=True):
        if one.matcher is not None and not one.matcher.accept(result.token):
            # A fault of the request, not of this engine: it would fail on any other engine too.
            message = "no token can continue the grammar, or it takes too long to find one"
            param = one.sampling.structure.param if one.sampling.structure is not None else None
            result.failure = BadRequest(message, param=param)
        elif one.sampling.logprobs is not None:
            _add_logprobs(result, row, one.sampling.logprobs)
    return sampled


# Adjustments of logits, row by row


def _adjust(logits: Tensor, generations: Sequence[Generation]) -> Tensor:
    """Return a copy with penalties, biases and masks applied; `logits` itself if there are none."""
    adjusted = [n for n, one in enumerate(generations) if _needs_adjustment(one)]
    if not adjusted:
        return logits
    rows = logits.clone()
    for n in adjusted:
        _adjust_row(rows[n], generations[n])
    return rows


def _needs_adjustment(generation: Generation) -> bool:
    sampling = generation.sampling
    return (
        generation.matcher is not None
        or bool(sampling.logit_bias)
        or sampling.presence_penalty != 0.0
        or sampling.frequency_penalty != 0.0
        or sampling.repetition_penalty != 1.0
        or _too_short(generation)
    )


def _too_short(generation: Generation) -> bool:
    produced = len(generation.tokens) - generation.prompt_len
    return produced < generation.sampling.min_tokens and bool(generation.stop_ids)


def _adjust_row(row: Tensor, generation: Generation) -> None:
    """Adjust one row in place.

    In this order: the repetition penalty over prompt and output, OpenAI's presence and frequency
    penalties over the output, the logit bias, the grammar's mask, and no stop token before
    `min_tokens`.
    """
    sampling = generation.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(list(set(generation.tokens)), device=row.device)
        values = row[seen]
        factor = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    if sampling.presence_penalty or sampling.frequency_penalty:
        ids, counts = np.unique(np.asarray(generation.output, dtype=np.int64), return_counts=True)
        penalty = sampling.presence_penalty + sampling.frequency_penalty * counts
        indices = torch.from_numpy(ids).to(row.device)
        row[indices] -= torch.from_numpy(penalty.astype(np.float32)).to(row.device)
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    if generation.matcher is not None:
        allowed = torch.from_numpy(generation.matcher.allowed()).to(row.device)
        row.masked_fill_(~allowed, -torch.inf)
    if _too_short(generation):
        stops = torch.tensor(list(generation.stop_ids), device=row.device)
        without_stops = row.index_fill(0, stops, -torch.inf)
        # If the grammar allows nothing but a stop token, the output ends early.
        if generation.matcher is None or bool(without_stops.isfinite().any()):
            row.copy_(without_stops)


# Draws


def _draw(rows: Rows, generations: Sequence[Generation]) -> Tokens:
    """Return the argmax of logit/T + g over the tokens that pass the filters, `[rows]`.

    The result is 0 for rows without such tokens. A token's noise does not depend on which other
    tokens pass.
    """
    count, vocab = rows.shape
    samplings = [one.sampling for one in generations]
    temperature = np.array([[sampling.temperature] for sampling in samplings])
    gumbel = Gumbel(
        [(one.sampling.seed, one.sampling.choice, len(one.tokens)) for one in generations], vocab
    )
    largest = rows.group_maxima(GROUPS)
    least = least_logits(rows, largest.max(-1, keepdims=True), samplings)
    member = np.arange(gumbel.members) * GROUPS

    def members(row: Tokens, group: Tokens) -> tuple[Tokens, Floats]:
        """Return the tokens of (row, group) pairs and their logit/T, -inf for filtered tokens."""
        token = group[:, None] + member
        logits = rows.at(row[:, None], token.clip(max=vocab - 1))
        passing = (logits >= least[row]) & (token < vocab)
        return token, np.where(passing, logits / temperature[row], -np.inf)

    # Branch and bound: no member of a group scores above the group's largest logit plus its
    # largest noise. The exact scores of a few groups with high bounds give a lower bound of the
    # maximum; then only groups and tokens that can reach it are scored.
    max_gumbel = gumbel.group_maxima()
    bounds = largest / temperature
    bounds += max_gumbel
    bounds[largest < least] = -np.inf
    row = np.repeat(np.arange(count), SLICES)
    group = bounds.reshape(len(row), -1).argmax(-1)
    group += np.tile(np.arange(0, GROUPS, GROUPS // SLICES), count)
    token, score = members(row, group)
    score += gumbel.at(row[:, None], token)
    reached = score.reshape(count, -1).max(-1, keepdims=True, initial=LOWEST)
    reached -= SLACK * np.abs(reached)
    row, group = np.divmod(np.flatnonzero(bounds >= reached), GROUPS)
    token, score = members(row, group)
    candidates = np.nonzero(score + max_gumbel[row, group, None] >= reached[row])
    row, token, score = row[candidates[0]], token[candidates], score[candidates]
    score += gumbel.at(row, token)
    best = np.full(count, -np.inf)
    np.maximum.at(best, row, score)
    won = score == best[row]
    drawn = np.zeros(count, dtype=np.int64)
    drawn[row[won]] = token[won]
    return drawn


# Log probabilities


def _add_logprobs(sampled: Sampled, row: Tensor, top: int) -> None:
    """Add log probabilities of the raw logits, before penalties and temperature, as vLLM does."""
    logprobs = row.log_softmax(-1)
    sampled.logprob = float(logprobs[sampled.token])
    if top:
        values, ids = logprobs.topk(top)
        sampled.top = list(zip(ids.tolist(), values.tolist(), strict=True))
