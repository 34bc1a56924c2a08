"""Mean times to the first token by queueing theory (Zhong et al. 2024, DistServe, §3.1).

Prompts of one length arrive at random times and are computed one at a time, first come, first
served: the queue M/D/1. Two GPUs serve it as a pipeline of two stages, or divide each layer, which
makes a prompt faster by a factor below 2.
"""

from __future__ import annotations

from engine.protocol import BadRequest

__all__ = ["crossover", "divided_ttft", "mean_ttft", "pipelined_ttft"]


def mean_ttft(rate: float, prompt_s: float) -> float:
    """Return the mean seconds to the first token on one GPU (equation 1): `D + RD² / 2(1 - RD)`.

    `rate` R is in requests/s, and `prompt_s` D the seconds of a prompt.

    Raises: `BadRequest` if requests come faster than they are served.
    """
    return prompt_s + _wait(rate, prompt_s)


def pipelined_ttft(rate: float, prompt_s: float) -> float:
    """Return it for a pipeline of two GPUs (equation 2): `D + RD² / 4(2 - RD)`.

    A prompt takes as long as on one GPU, and the next one follows after half of that.

    Raises: `BadRequest` as `mean_ttft`.
    """
    return prompt_s + _wait(rate, prompt_s / 2)


def divided_ttft(rate: float, prompt_s: float, speedup: float) -> float:
    """Return it for two GPUs that divide each layer (equation 3): `D/K + RD² / 2K(K - RD)`.

    Raises: `BadRequest` as `mean_ttft`.
    """
    return mean_ttft(rate, prompt_s / speedup)


def crossover(speedup: float) -> float:
    """Return the load RD at which both ways are equally fast; below it, dividing layers is faster.

    Raises: `BadRequest` if the speed-up K is not between 1 and 2.
    """
    if not 1 < speedup < 2:
        raise BadRequest(f"two GPUs are faster than one by a factor between 1 and 2, not {speedup}")
    low, high = 0.0, speedup
    while (middle := (low + high) / 2) not in (low, high):
        if divided_ttft(middle, 1.0, speedup) < pipelined_ttft(middle, 1.0):
            low = middle
        else:
            high = middle
    return low


def _wait(rate: float, service_s: float) -> float:
    """Return the mean seconds in the queue M/D/1, by Pollaczek and Khinchine."""
    load = rate * service_s
    if load >= 1:
        raise BadRequest(f"at {rate:g} requests/s, of {service_s:g} s each, the queue only grows")
    return load * service_s / (2 * (1 - load))
