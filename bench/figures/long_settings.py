"""The clusters and the requests of Infinite-LLM's figures, at a scale that takes seconds to run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random

from engine.latency import DEVICES, MODELS, FittedLatency, Profile, find_profile, pool_tokens

__all__ = ["EIGHT_GPUS", "FOUR_GPUS", "PAGE", "SMALL", "Setting", "coarse", "write_trace"]

PAGE = 128  # tokens of the simulation: a block, which is lent, is one page
OUTPUT = 500  # tokens, each with the room of `coarse`; the paper does not say how many
SLACK = 1.05  # of a pool over `FITS`: the output, and a block to compute in
PEAK = 312e12 / 3  # FLOP/s of attention on one A100: a third of its peak, as in other profiles


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the paper's Table 2, on instances of two GPUs each."""

    name: str
    instances: int
    large: str  # profile of the baseline's one instance
    normal: int  # tokens of the longest normal request
    long: int  # tokens of the longest long one
    coarse: int  # tokens of a context that one token of the simulation stands for

    @property
    def pool_pages(self) -> int:
        """Pages of an instance of two GPUs."""
        return int(FITS * SLACK) // self.coarse // PAGE

    @property
    def pool(self) -> int:
        """Tokens of the simulation in the pool of an instance of two GPUs."""
        return self.pool_pages * PAGE


SMALL = "opt-13b@a100:tp2"  # of an instance
FITS = 140_000  # tokens in an instance's pool, by Table 2
EIGHT = "opt-13b@a100:tp8"  # by `_eight`
FOUR_GPUS = Setting("13B, 4 GPUs", 2, "opt-13b@a100:tp4", 140_000, 280_000, 8)
EIGHT_GPUS = Setting("13B, 8 GPUs", 4, EIGHT, 240_000, 480_000, 16)


@cache
def coarse(name: str, k: int) -> Profile:
    """Return a profile whose tokens stand for `k` ones each, so that a run is shorter.

    Costs per token of a prompt or a context grow by that factor, and squares by its square. What a
    decode costs beside its context stays. Attention among the tokens of prompts takes a third of
    the device's peak, as in the profiles of splitwise-sim's times: DistServe's coefficients are
    fitted to prompts of up to 2048 tokens, and their squares contradict each other beyond.
    """
    profile = _eight() if name == EIGHT else find_profile(name)
    step = _fitted(profile)
    shape, (own, token, _) = MODELS[profile.model], step.prefill
    square = 2e3 * shape.hidden * shape.layers / (PEAK * profile.gpus)
    scaled = replace(
        step,
        prefill=(own, token * k, square * k * k),
        decode=(step.decode[0], step.decode[1] * k, step.decode[2]),
        large_decode=(step.large_decode[0], step.large_decode[1] * k, step.large_decode[2]),
    )
    return replace(
        profile, step=scaled, kv_bytes_per_token=profile.kv_bytes_per_token * k,
        pool_tokens=profile.pool_tokens // k,
    )  # fmt: skip


def _eight() -> Profile:
    """Return OPT-13B on eight GPUs, of which there are no public times.

    Each coefficient changes from four GPUs to eight as that of OPT-66B does. A larger model loses
    less to its division, so this is in favour of the one instance.
    """
    four, before, after = map(
        find_profile, ("opt-13b@a100:tp4", "opt-66b@a100:tp4", "opt-66b@a100:tp8")
    )
    own, less, more = map(_fitted, (four, before, after))

    def scaled(kind: str) -> tuple[float, float, float]:
        first, token, sequence = (
            value * b / a
            for value, a, b in zip(
                getattr(own, kind), getattr(less, kind), getattr(more, kind), strict=True
            )
        )
        return first, token, sequence

    step = replace(
        own, prefill=scaled("prefill"), decode=scaled("decode"),
        large_decode=scaled("large_decode"),
    )  # fmt: skip
    pool = pool_tokens(MODELS[four.model], DEVICES[four.device], tp=8)
    return replace(four, name=EIGHT, gpus=8, step=step, pool_tokens=pool)


def _fitted(profile: Profile) -> FittedLatency:
    if not isinstance(profile.step, FittedLatency):
        raise TypeError(profile.name)
    return profile.step


def write_trace(
    path: Path, setting: Setting, ratio: float, requests: int, rate: float, seed: int
) -> int:
    """Write a trace: lengths are uniform in their range, and long requests evenly spread.

    Return how many are longer than a pool. All long ones are.
    """
    random = Random(f"{setting.name} {ratio} {seed}")
    lines, at, beyond = ["TIMESTAMP,ContextTokens,GeneratedTokens"], 0.0, 0
    for number in range(requests):
        long = int((number + 0.5) * ratio + 0.5) > int((number - 0.5) * ratio + 0.5)
        low, high = setting.coarse, setting.normal
        if long:
            low = max(setting.normal, setting.pool * setting.coarse) + setting.coarse
            high = setting.long
        tokens = max(random.randint(low, high) // setting.coarse - OUTPUT, 1)
        beyond += tokens + OUTPUT > setting.pool
        minutes, seconds = divmod(at, 60)
        hours, minutes = divmod(int(minutes), 60)
        lines.append(f"2023-01-01 {hours:02}:{minutes:02}:{seconds:09.6f},{tokens},{OUTPUT}")
        at += random.expovariate(rate)
    path.write_text("\n".join(lines) + "\n")
    return beyond
