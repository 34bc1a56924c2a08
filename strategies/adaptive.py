"""Changes the strategy with the traffic: policy-driven reconfiguration (§3.2).

Two things are measured of the last requests, both of the traffic and not of the strategy that
served it, so that a choice does not confirm itself:

- *Reuse*, the share of a prompt that some engine has cached. If it is high, little is left to
  prefill, and `cache_aware` sends each request to its context.
- *Prefill load*, ρ = λ·m·s / n: the share of their time in which n engines would compute the long
  prompts, if they did nothing else. λ·m tokens of them arrive in a second, and each takes s
  seconds. A prompt longer than a step is computed in parts beside the decodes. An engine bounds
  these parts so that decodes go on: to a third of its time with `--decode-slowdown 1.5`. If ρ is
  higher, prompts queue although all streams are slowed down (DistServe's interference), and it is
  better that some engines prefill and others decode: `prefill_decode`. If ρ is lower, moving KV
  costs more than it saves, and `data_parallel` makes the fewest calls.

Where engines have roles, `balanced` takes the place of both: it keeps either role from being the
bottleneck.

s is the least time per token that a long prompt took to its first token, and is forgotten slowly: a
queue delays many prompts but seldom all. What is entered at its threshold is left at 0.7 of it, so
noise does not switch to and fro.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from pydantic import Field

from router import Chunk, Cluster, Request, Strategy, strategy
from strategies.balanced import balanced
from strategies.cache_aware import cache_aware
from strategies.data_parallel import data_parallel
from strategies.prefill_decode import prefill_decode

__all__ = ["Traffic", "adaptive"]

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Reuse = Annotated[Share, Field(description="cached share of the prompts for `cache_aware`")]
Busy = Annotated[
    Share, Field(description="prefill load for `prefill_decode`, of the engines' time")
]
Long = Annotated[int, Field(ge=1, description="tokens to compute from which a prompt is long")]
Window = Annotated[int, Field(ge=1, le=4096, description="requests after which the past fades")]

Params = dict[str, Any]
FORGET = 1.001  # factor of s at each long prompt
LEAVE = 0.7  # share of a threshold below which its state ends


@strategy
async def adaptive(
    request: Request,
    cluster: Cluster,
    *,
    reuse: Reuse = 0.3,
    busy: Busy = 0.35,
    long: Long = 768,
    window: Window = 24,
) -> AsyncGenerator[Chunk, None]:
    """Serve each request by the strategy that suits the traffic of the last `window` requests.

    That is `cache_aware` if a share `reuse` of the prompts is cached; else `prefill_decode` if
    prompts of `long` tokens and more need a share `busy` of the engines' time; else
    `data_parallel`. Where engines have roles, it is `balanced` instead of these two.
    """
    traffic, clock = cluster.state(Traffic), asyncio.get_running_loop().time
    began, total = clock(), len(request.tokens)
    missing = total - max(engine.cached(request) for engine in cluster.engines)
    awaited = missing >= long
    if not request.output:  # else its engine has died: it has been counted before
        traffic.note_request(began, 1 - missing / total, missing if awaited else 0, window)
    delegate, params = traffic.choose(cluster, reuse, busy)
    async for chunk in delegate(request, cluster, **params):
        if awaited and chunk.token_ids:
            traffic.note_first_token(clock() - began, missing)
            awaited = False
        yield chunk


class Traffic:
    """What is known of the last requests: `cluster.state(Traffic)`."""

    def __init__(self) -> None:
        self.reuse = 0.0
        self._token_s = 0.0  # s of the rule; 0: not known yet
        self._tokens = 0.0  # of long prompts
        self._seconds = 1.0  # in which they came; at first as after a second without any
        self._last: float | None = None  # when the last request came (s)
        self._reusing = self._separate = False

    def note_request(self, at: float, cached: float, long_tokens: int, window: int) -> None:
        """Note when a request came (s), its cached share, and its tokens if it is long."""
        self.reuse += (cached - self.reuse) / window
        keep = 1 - 1 / window
        self._tokens = keep * self._tokens + long_tokens
        self._seconds = keep * self._seconds + at - (at if self._last is None else self._last)
        self._last = at

    def note_first_token(self, seconds: float, tokens: int) -> None:
        """Note how long a long prompt took to its first token."""
        sample = seconds / tokens
        self._token_s = min(sample, self._token_s * FORGET) if self._token_s else sample

    def load(self, engines: int) -> float:
        """Return ρ of so many engines."""
        arriving = self._tokens / self._seconds if self._seconds else 0.0
        return arriving * self._token_s / engines

    def choose(self, cluster: Cluster, reuse: float, busy: float) -> tuple[Strategy, Params]:
        """Return the strategy for the next request, and its parameters."""
        engines = list(cluster.engines)
        self._reusing = self.reuse >= reuse * (LEAVE if self._reusing else 1)
        self._separate = self.load(len(engines)) >= busy * (LEAVE if self._separate else 1)
        if self._reusing:
            return cache_aware, {}
        if any(engine.role != "any" for engine in engines):
            return balanced, {"ratio": "auto"}
        return (prefill_decode if self._separate else data_parallel), {}
