"""Machines for prompts and machines for tokens: DéjàVu's planner (Strati et al. 2024, appendix D).

A microbatch passes a pipeline of machines, each with a share of the layers. With `depth` machines,
a stage computes a prompt in `prompt_s / depth` and a token in `token_s / depth`.

For D machines, Y and t are the times of one of D stages. With `streaming` m = max(1, transfer of a
stage's KV / its prompt time), D_p machines for prompts and D_t = D - D_p for tokens, a microbatch
takes `max(m·Y·D/D_p, N·t·D/D_t)` seconds in steady state, against `Y + N·t + (D-1)(Y-t)/D` where
all machines do both (equation 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor

from engine.protocol import BadRequest

__all__ = [
    "Microbatch",
    "Split",
    "balanced_split",
    "colocated_s",
    "disaggregation_wins",
    "least_machines",
    "plan_split",
    "streaming_overhead",
    "swapping_helps",
]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A model's layers, and what a microbatch needs of machines."""

    layers: int
    layer_bytes: float  # weights of a layer, W0
    prompt_kv_bytes: float  # KV of all prompts in a layer, C0
    token_kv_bytes: float  # KV of all new tokens in a layer, K0
    prompt_s: float  # to compute the prompts on one machine with all layers
    token_s: float  # to compute a token of each request, likewise
    tokens: int  # new tokens of a request, N


@dataclass(frozen=True, slots=True)
class Split:
    """Machines for prompts and for tokens, and the seconds per microbatch of each pipeline."""

    prompt: int
    token: int
    streaming: float  # m
    prompt_s: float  # of the prompt pipeline, in steady state
    token_s: float  # of the token pipeline

    @property
    def seconds(self) -> float:
        """Seconds per microbatch in steady state: the slower pipeline's."""
        return max(self.prompt_s, self.token_s)


def least_machines(batch: Microbatch, machine_bytes: float) -> tuple[int | None, int | None]:
    """Return the fewest machines for prompts and for tokens (equations 2 and 3, in whole layers).

    A prompt machine holds one microbatch's KV of its layers. Token machines hold as many
    microbatches as there are machines. `None`: no number of machines suffices.
    """
    prompt_layers = floor(machine_bytes / (batch.layer_bytes + batch.prompt_kv_bytes))
    kv = batch.layers * (batch.prompt_kv_bytes + batch.token_kv_bytes)
    token_layers = floor((machine_bytes - kv) / batch.layer_bytes)
    return (
        ceil(batch.layers / prompt_layers) if prompt_layers > 0 else None,
        ceil(batch.layers / token_layers) if token_layers > 0 else None,
    )


def balanced_split(
    machines: int, prompt_s: float, token_s: float, tokens: int, streaming: float = 1.0
) -> tuple[float, float]:
    """Return D_p and D_t, not rounded, for which both pipelines are equally fast (formulas 6, 7).

    Only the ratio of `prompt_s` and `token_s` matters.
    """
    prompts = streaming * prompt_s
    whole = prompts + tokens * token_s
    return machines * prompts / whole, machines * tokens * token_s / whole


def streaming_overhead(transfer_s: float, prompt_s: float) -> float:
    """Return m: the prompt time with streaming over that without, if computing hides the rest."""
    return max(1.0, transfer_s / prompt_s)


def disaggregation_wins(
    machines: int, prompt_s: float, token_s: float, streaming: float = 1.0
) -> bool:
    """Return whether disaggregation has the higher throughput (equation 5).

    It needs m < 2 - 1/D: beyond that, no ratio of prompt to token time suffices.
    """
    room = machines * (2 - streaming) - 1
    return room > 0 and prompt_s / token_s > (machines - 1) / room


def colocated_s(machines: int, batch: Microbatch) -> float:
    """Return the seconds per microbatch if all machines compute prompts and tokens (equation 4)."""
    prompt, token = batch.prompt_s / machines, batch.token_s / machines
    return prompt + batch.tokens * token + (machines - 1) * (prompt - token) / machines


def plan_split(
    machines: int, batch: Microbatch, machine_bytes: float, bandwidth: float
) -> list[Split]:
    """Return the splits that fit in memory, the fastest first; equal ones with fewer for prompts.

    `bandwidth` is that between machines in bytes/s, each way. Each prompt machine sends the KV of
    its own layers while it computes.

    Raises: `BadRequest`, which says what is short, if none fits.
    """
    least_prompt, least_token = least_machines(batch, machine_bytes)
    kv_bytes = batch.layers * (batch.prompt_kv_bytes + batch.token_kv_bytes)
    if least_prompt is None:
        needed = batch.layer_bytes + batch.prompt_kv_bytes
        raise BadRequest(
            f"GPU memory: a layer and a microbatch's KV in it take {needed / 1e9:.4g} GB, and a "
            f"machine has {machine_bytes / 1e9:.4g} GB"
        )
    if least_token is None:
        raise BadRequest(
            f"GPU memory: the KV of a microbatch takes {kv_bytes / 1e9:.4g} GB and a layer "
            f"{batch.layer_bytes / 1e9:.4g} GB, and a machine for tokens has "
            f"{machine_bytes / 1e9:.4g} GB, however many there are; make the microbatch smaller"
        )
    if least_prompt + least_token > machines:
        raise BadRequest(
            f"machines: prompts need {least_prompt} and tokens {least_token} for their memory, "
            f"and there are {machines}"
        )
    splits = [
        _split(machines, prompt, batch, bandwidth)
        for prompt in range(least_prompt, machines - least_token + 1)
    ]
    return sorted(splits, key=lambda split: (split.seconds, split.prompt))


def _split(machines: int, prompt: int, batch: Microbatch, bandwidth: float) -> Split:
    stage_s = batch.prompt_s / prompt
    sent = batch.layers * batch.prompt_kv_bytes / prompt
    streaming = streaming_overhead(sent / bandwidth, stage_s)
    token = machines - prompt
    return Split(
        prompt, token, streaming, streaming * stage_s, batch.tokens * batch.token_s / token
    )


def swapping_helps(
    token_s: float, tokens: int, prompt: int, kv_bytes: float, host_bandwidth: float
) -> bool:
    """Return whether twice the microbatch with swapping beats the microbatch without (§G.1).

    Swapping keeps all microbatches in host memory and brings each back before its step:
    `2·N·t >= sum over i from p to N+p of max(t, i·B·C / bandwidth)`. `kv_bytes` is B·C, the KV of a
    token of all requests of the microbatch, on one machine. `host_bandwidth` is in bytes/s.
    """
    swapped = sum(
        max(token_s, length * kv_bytes / host_bandwidth)
        for length in range(prompt, tokens + prompt + 1)
    )
    return 2 * tokens * token_s >= swapped
