"""Drawing tokens from logits.

Randomness is a function of (seed, choice, position) alone, never of the engine or the batch: the
request goes on with the same tokens wherever it moves. A token is drawn by the Gumbel-max rule,
argmax(logit/T + g) with g = −ln(−ln u): other than a search in a cumulated distribution, it does
not change with the last bits of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.job import Generation, Sampled
from engine.protocol import BadRequest, Sampling

__all__ = ["sample"]

LIKELY = 1024  # tokens among which a nucleus is looked for first
GREEDY_BELOW = 1e-5  # a temperature under which noise cannot matter


def sample(logits: torch.Tensor, generations: Sequence[Generation]) -> list[Sampled]:
    """One token for each generation. `logits` is `[len(generations), vocab]` float32."""
    drawn = logits.argmax(-1).tolist()
    sampled = []
    for row, generation, token in zip(logits, generations, drawn, strict=True):
        sampling = generation.sampling
        if _is_plain(generation):
            result = Sampled(token)
        else:
            adjusted = _penalised(row, generation)
            if sampling.temperature >= GREEDY_BELOW:
                adjusted = _filtered(adjusted / sampling.temperature, sampling)
                result = Sampled(_drawn(adjusted, sampling, len(generation.tokens)))
            else:
                result = Sampled(int(adjusted.argmax()))
        if generation.matcher is not None and not generation.matcher.accept(result.token):
            # The request's fault: elsewhere it would fail as well, and no engine is to be blamed.
            message = "no token can continue the grammar, or it takes too long to find one"
            param = sampling.structure.param if sampling.structure is not None else None
            result.failure = BadRequest(message, param=param)
        elif sampling.logprobs is not None:
            _add_logprobs(result, row, sampling.logprobs)
        sampled.append(result)
    return sampled


def _is_plain(generation: Generation) -> bool:
    """Greedy, and nothing moves the logits."""
    sampling = generation.sampling
    return (
        sampling.temperature < GREEDY_BELOW
        and generation.matcher is None
        and not sampling.logit_bias
        and sampling.presence_penalty == 0.0
        and sampling.frequency_penalty == 0.0
        and sampling.repetition_penalty == 1.0
        and not _too_short(generation)
    )


def _too_short(generation: Generation) -> bool:
    return len(generation.output) < generation.sampling.min_tokens and bool(generation.stop_ids)


def _penalised(row: torch.Tensor, generation: Generation) -> torch.Tensor:
    """Repetition penalty over prompt and output, the OpenAI penalties over the output, the bias."""
    sampling = generation.sampling
    row = row.clone()
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(generation.tokens)), device=row.device)
        values = row[seen]
        by = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / by, values * by)
    if generation.output and (sampling.presence_penalty or sampling.frequency_penalty):
        ids, counts = np.unique(np.asarray(generation.output), return_counts=True)
        penalty = sampling.presence_penalty + sampling.frequency_penalty * counts
        row[torch.from_numpy(ids)] -= torch.from_numpy(penalty.astype(np.float32)).to(row.device)
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
            row = longer
    return row


def _filtered(row: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Keep what min_p, top_k and top_p leave, in this order; the likeliest token always stays."""
    if sampling.min_p > 0.0:
        # p ≥ min_p · max p, in logits
        row = row.masked_fill(row < row.max() + float(np.log(sampling.min_p)), -torch.inf)
    if 0 < sampling.top_k < len(row):
        row = row.masked_fill(row < row.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1.0:
        row = _nucleus(row, sampling.top_p)
    return row


def _nucleus(row: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the likeliest tokens, as many as it takes for their probabilities to reach `top_p`."""
    total = row.logsumexp(-1)
    for count in (LIKELY, len(row)):  # sorting all of a vocabulary takes ten times as long
        values, where = row.topk(min(count, len(row)))
        upto = (values - total).exp_().cumsum_(-1)
        if upto[-1] >= top_p:
            break
    keep = int((upto[:-1] < top_p).sum()) + 1
    return torch.full_like(row, -torch.inf).index_copy_(0, where[:keep], values[:keep])


def _drawn(row: torch.Tensor, sampling: Sampling, position: int) -> int:
    """argmax(row + g). A token's noise is the same, however many are left with it."""
    logits = row.cpu().numpy()
    left = np.flatnonzero(logits > -np.inf)
    if not len(left):
        return 0  # nothing may be drawn, which is the grammar's to say
    uniform = _uniform(sampling, position, len(row))[left]
    return int(left[np.argmax(logits[left] - np.log(-np.log(uniform)))])


def _uniform(sampling: Sampling, position: int, vocab: int) -> npt.NDArray[np.float32]:
    """`[vocab]` in (0, 1), of one draw, from Philox keyed with seed, choice and position."""
    # As uint64 from the start: numpy would round integers from 2⁶³ on to floats.
    key = np.array([sampling.seed % 2**64, sampling.choice << 32 | position], dtype=np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key)).random(vocab, dtype=np.float32)
    # u = 0 would be −∞ and u = 1 does not occur; float32 steps of u end at 1 − 2⁻²⁴
    return np.maximum(uniform, np.float32(1e-20))


def _add_logprobs(sampled: Sampled, row: torch.Tensor, top: int) -> None:
    """Of the raw logits, before penalties and temperature, as vLLM's default."""
    logprobs = row.log_softmax(-1)
    sampled.logprob = float(logprobs[sampled.token])
    if top:
        values, ids = logprobs.topk(top)
        sampled.top = list(zip(ids.tolist(), values.tolist(), strict=True))
