"""Drawing tokens from logits, a whole batch at a time.

Randomness is a function of (seed, choice, position) alone, never of the engine or the batch: the
request goes on with the same tokens wherever it moves. A token is drawn by the Gumbel-max rule,
argmax(logit/T + g): other than a search in a cumulated distribution, it does not change with the
last bits of the logits.

A row's bits are those that it has alone. What is left of whole rows is little, and numpy's: its
calls take less time than torch's, and noise is the same on every device.
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
from engine.scheduling.jobs import Generation

__all__ = ["sample"]

Tokens = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SLICES = 8  # of the groups; in each, one shows what can be reached
LOWEST = -1e300  # below any score, but for those that are left out
SLACK = 1e-12  # logarithms need not be rounded alike wherever they stand in an array
GREEDY_BELOW = 1e-5  # a temperature under which noise cannot matter


@torch.inference_mode()
def sample(logits: Tensor, generations: Sequence[Generation]) -> list[Sampled]:
    """One token for each generation. `logits` is `[len(generations), vocab]` float32."""
    if not generations:
        return []
    rows = rows_of(_adjusted(logits, generations))
    warm = [n for n, one in enumerate(generations) if one.sampling.temperature >= GREEDY_BELOW]
    if len(warm) == len(generations):
        tokens = _drawn(rows, generations)
    else:
        tokens = rows.likeliest()
        if warm:
            tokens[warm] = _drawn(rows.some(warm), [generations[n] for n in warm])
    sampled = [Sampled(token) for token in tokens.tolist()]
    for one, row, result in zip(generations, logits, sampled, strict=True):
        if one.matcher is not None and not one.matcher.accept(result.token):
            # The request's fault: elsewhere it would fail as well, and no engine is to be blamed.
            message = "no token can continue the grammar, or it takes too long to find one"
            param = one.sampling.structure.param if one.sampling.structure is not None else None
            result.failure = BadRequest(message, param=param)
        elif one.sampling.logprobs is not None:
            _add_logprobs(result, row, one.sampling.logprobs)
    return sampled


# What moves logits, row by row


def _adjusted(logits: Tensor, generations: Sequence[Generation]) -> Tensor:
    """The logits, or a copy of them with all that moves those of some rows."""
    moved = [n for n, one in enumerate(generations) if _moves(one)]
    if not moved:
        return logits
    rows = logits.clone()
    for n in moved:
        _move(rows[n], generations[n])
    return rows


def _moves(generation: Generation) -> bool:
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


def _move(row: Tensor, generation: Generation) -> None:
    """Repetition penalty over prompt and output, the OpenAI penalties over the output, the bias,
    what the grammar allows, and no end before its time: in place."""
    sampling = generation.sampling
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(list(set(generation.tokens)), device=row.device)
        values = row[seen]
        by = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / by, values * by)
    if sampling.presence_penalty or sampling.frequency_penalty:
        ids, counts = np.unique(np.asarray(generation.output, dtype=np.int64), return_counts=True)
        penalty = sampling.presence_penalty + sampling.frequency_penalty * counts
        where = torch.from_numpy(ids).to(row.device)
        row[where] -= torch.from_numpy(penalty.astype(np.float32)).to(row.device)
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    if generation.matcher is not None:
        allowed = torch.from_numpy(generation.matcher.allowed()).to(row.device)
        row.masked_fill_(~allowed, -torch.inf)
    if _too_short(generation):
        stops = torch.tensor(list(generation.stop_ids), device=row.device)
        longer = row.index_fill(0, stops, -torch.inf)
        # A grammar that is at its end is: nothing else could be drawn.
        if generation.matcher is None or bool(longer.isfinite().any()):
            row.copy_(longer)


# Draws


def _drawn(rows: Rows, generations: Sequence[Generation]) -> Tokens:
    """`[rows]`: the argmax of logit/T + g among the tokens that the filters leave; 0 where nothing
    is left. A token's noise is the same, however many are left with it."""
    count, vocab = rows.shape
    samplings = [one.sampling for one in generations]
    temperature = np.array([[sampling.temperature] for sampling in samplings])
    noise = Gumbel(
        [(one.sampling.seed, one.sampling.choice, len(one.tokens)) for one in generations], vocab
    )
    largest = rows.group_maxima(GROUPS)
    least = least_logits(rows, largest.max(-1, keepdims=True), samplings)
    member = np.arange(noise.members) * GROUPS

    def members(row: Tokens, group: Tokens) -> tuple[Tokens, Floats]:
        """The tokens of some rows' groups, and what is left of their logits over temperature."""
        token = group[:, None] + member
        logits = rows.at(row[:, None], token.clip(max=vocab - 1))
        left = (logits >= least[row]) & (token < vocab)
        return token, np.where(left, logits / temperature[row], -np.inf)

    # Nobody in a group scores more than its largest logit with its largest noise. A few groups
    # where that is much show what can be reached; then only those are looked at that can reach it.
    most = noise.most()
    bounds = largest / temperature
    bounds += most
    bounds[largest < least] = -np.inf
    row = np.repeat(np.arange(count), SLICES)
    group = bounds.reshape(len(row), -1).argmax(-1)
    group += np.tile(np.arange(0, GROUPS, GROUPS // SLICES), count)
    token, score = members(row, group)
    score += noise.at(row[:, None], token)
    reached = score.reshape(count, -1).max(-1, keepdims=True, initial=LOWEST)
    reached -= SLACK * np.abs(reached)
    row, group = np.divmod(np.flatnonzero(bounds >= reached), GROUPS)
    token, score = members(row, group)
    some = np.nonzero(score + most[row, group, None] >= reached[row])
    row, token, score = row[some[0]], token[some], score[some]
    score += noise.at(row, token)
    best = np.full(count, -np.inf)
    np.maximum.at(best, row, score)
    won = score == best[row]
    drawn = np.zeros(count, dtype=np.int64)
    drawn[row[won]] = token[won]
    return drawn


# Log probabilities


def _add_logprobs(sampled: Sampled, row: Tensor, top: int) -> None:
    """Of the raw logits, before penalties and temperature, as vLLM's default."""
    logprobs = row.log_softmax(-1)
    sampled.logprob = float(logprobs[sampled.token])
    if top:
        values, ids = logprobs.topk(top)
        sampled.top = list(zip(ids.tolist(), values.tolist(), strict=True))
