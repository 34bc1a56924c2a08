"""A dry run: runs a strategy against virtual engines before real requests depend on it.

Its scenarios have short and long prompts, cold and warm caches, one engine and several, concurrent
requests, a cancellation at every point, and an engine that dies in mid-stream. Each time the
strategy must yield exactly the tokens that the engines emit, and leave nothing behind. Time is
virtual: an hour of waiting takes no time. The engines support everything, or are like those of a
fleet; the first scenarios are on that fleet then.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from engine.latency import FixedLatency, Profile, PutLatency
from engine.protocol import EngineConfig, MicroserveError, Sampling, Unsupported
from engine.virtual import EngineKind, VirtualLoop, output_tokens
from router.base import Chunk, Request, RouterConfig, StrategyError, root_cause
from router.dry_run.fleet_engine import FleetEngine
from router.engines import Role
from router.execution import ChoiceWriter
from router.simulation import SimulatedRouter, VirtualFleet, simulated_router
from router.strategy import Bound
from router.supervision import Watchdog, adopting
from router.telemetry import Metrics

__all__ = ["DryRunFailed", "Trial", "dry_run", "trial"]

LENGTHS = (1, 7, 16, 17, 100, 700)
NEW = 6
CLUSTERS: tuple[tuple[Role, ...], ...] = (
    ("any",), ("any", "any"), ("prefill", "decode"), ("any", "any", "any", "any"),
    ("prefill", "prefill", "decode", "decode"),
)  # fmt: skip
CONFIG = RouterConfig(
    health_interval_s=1e6, request_timeout_s=600.0, stall_s=30.0, release_timeout_s=2.0,
    max_queue=8, retry_share=1.0,
)  # fmt: skip
CALL_S = 1e-3
RELEASE_S = 0.02  # more than it takes to tell the engines that something has ended
PROFILE = Profile(
    name="dry-run", model="virtual", device="none", gpus=0, source="made up", layers=2,
    kv_bytes_per_token=1000, context_length=4096, pool_tokens=1 << 16,
    step=FixedLatency(step_ms=1.0, prompt_tokens_per_ms=100.0),
    put=PutLatency(bandwidth=1e9, layer_s=1e-4),
)  # fmt: skip
CANCELLATIONS = 64  # at most
CANCEL_STEP_S = 0.7e-3  # shorter than any call, so that every await is hit
BLOCK_LIMIT_S = 0.1
MOST_ALIKE, MOST_ENGINES = 2, 8  # engines that imitate a fleet: of each kind, and in all
# What a lone engine, or the death of one, brings about in any fleet.
USUAL_FALLBACKS = frozenset({"collapsed", "recomputed"})


class DryRunFailed(StrategyError):
    """Says what the strategy did, in which line, and in which scenario."""


def dry_run(
    bound: Bound, engines: Sequence[FleetEngine] = (), fallbacks: set[str] | None = None
) -> int:
    """Run all scenarios; return how many requests they made.

    The virtual engines are like `engines`, if there are any; what their requests fell back to is
    added to `fallbacks`. Raises `DryRunFailed`, and `Unsupported` for a call that they lack.

    It runs on an event loop of its own; a strategy that blocks it blocks the caller.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        try:
            return runner.run(_all(bound, engines, fallbacks if fallbacks is not None else set()))
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from None


async def _all(bound: Bound, engines: Sequence[FleetEngine], fallbacks: set[str]) -> int:
    requests = 0
    watchdog = Watchdog(Metrics(), BLOCK_LIMIT_S)
    with adopting(asyncio.get_running_loop()), watchdog.watching():
        if engines:
            like = _sample(engines)
            async with trial(bound, [one.role for one in like], like=like, whole=engines) as router:
                requests += await _answers(router)
                fallbacks |= router.fallbacks - USUAL_FALLBACKS
        for roles in CLUSTERS:
            async with trial(bound, roles, like=engines) as router:
                requests += await _answers(router)
        for roles in CLUSTERS[1:3]:
            requests += await _cancellations(bound, roles, engines)
            async with trial(bound, roles, dies_after=[NEW // 2], like=engines) as router:
                await router.check("an engine dies in mid-stream", [_prompt(50)])
                requests += router.requests
    return requests


def _sample(engines: Sequence[FleetEngine]) -> list[FleetEngine]:
    """Return some engines of each kind."""
    seen: Counter[object] = Counter()
    sample = []
    for engine in engines:
        seen[engine.like] += 1
        if seen[engine.like] <= MOST_ALIKE:
            sample.append(engine)
    return sample[:MOST_ENGINES]


async def _answers(router: Trial) -> int:
    """Run the requests that end by themselves; return how many."""
    for length in LENGTHS:
        tokens = "1 token" if length == 1 else f"{length} tokens"
        for state in ("cold", "warm"):
            await router.check(f"{tokens}, {state}", [_prompt(length)])
    await router.check("8 requests at once", [_prompt(30 + i) for i in range(8)])
    return router.requests


async def _cancellations(
    bound: Bound, roles: Sequence[Role], engines: Sequence[FleetEngine]
) -> int:
    """Cancel a request at every point; return how many requests that took."""
    for number in range(CANCELLATIONS):
        async with trial(bound, roles, like=engines) as router:
            if await router.cancel(number * CANCEL_STEP_S):
                return number
    return CANCELLATIONS


class _Discard(ChoiceWriter):
    """Keeps only the tokens."""

    def send(self, chunk: Chunk) -> None:
        pass


@dataclass(slots=True)
class Trial:
    """A strategy's scenarios on engines like those of `fleet`: on all kinds of them if `whole`."""

    router: SimulatedRouter
    roles: Sequence[str]
    fleet: Sequence[FleetEngine] = ()
    whole: bool = False
    requests: int = 0
    fallbacks: set[str] = field(default_factory=set)

    async def check(self, scenario: str, prompts: list[list[int]]) -> None:
        """Run concurrent requests, which must succeed."""
        self.requests += len(prompts)
        answers = await asyncio.gather(
            *(self.generate(prompt) for prompt in prompts), return_exceptions=True
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, MicroserveError):
                raise answer
            await self._check_clean(scenario)
            if isinstance(answer, Unsupported) and answer.code and self.fleet:
                self._check_supported(answer.code)
                continue
            if isinstance(answer, MicroserveError):
                self._fail(scenario, answer.message)
            wanted = output_tokens(prompt, NEW)
            if answer != wanted:
                self._fail(
                    scenario, f"it yielded the tokens {answer}, the engines emitted {wanted}"
                )

    async def cancel(self, after_s: float) -> bool:
        """Cancel a request after `after_s` seconds; return whether it had ended by then."""
        scenario = f"cancelled after {after_s * 1e3:.1f} ms"
        self.requests += 1
        running = asyncio.ensure_future(self.generate(_prompt(50)))
        done, _ = await asyncio.wait([running], timeout=after_s)
        if done:
            return True
        running.cancel()
        await asyncio.wait([running])
        await self._check_clean(scenario)
        if not running.cancelled():
            self._fail(scenario, f"it ended with {running.exception()!r}")
        return False

    async def generate(self, prompt: list[int]) -> list[int]:
        """Run one request and return its tokens. Raises the client's error."""
        sampling = Sampling(max_tokens=NEW, temperature=0.0)
        request = Request(
            id=f"dry-run-{self.requests}", prompt=prompt, sampling=sampling, session="dry-run"
        )
        receipt = self.router.receipt(request)
        writer = _Discard(receipt)
        try:
            await self.router.run(request, writer, receipt)
        finally:
            self.fallbacks.update(receipt.fallbacks)
        return writer.tokens

    async def _check_clean(self, scenario: str) -> None:
        await asyncio.sleep(RELEASE_S)
        if self.router.violations:
            self._fail(scenario, self.router.violations[0])
        if left := self.router.left:
            self._fail(scenario, f"it left {left}")

    def _check_supported(self, capability: str) -> None:
        """Raise `Unsupported` for a call that has failed a request, unless engines of the fleet
        support it that are not here."""
        lacking = [one.id for one in self.fleet if capability not in one.capabilities]
        if not lacking or not (self.whole or len(lacking) == len(self.fleet)):
            return
        name, many = self.router.revision.bound.strategy.name, len(lacking) > 1
        engines = f"engine{'s' if many else ''} {_listed(lacking)}"
        do = "do" if many else "does"
        raise Unsupported(
            f"strategy {name} calls {capability}, which {engines} {do} not support", param="name"
        )

    def _fail(self, scenario: str, what: str) -> None:
        revision, cluster = self.router.revision, "+".join(self.roles)
        name, prefix = revision.bound.strategy.name, f"{revision.label}: "
        raise DryRunFailed(
            f"strategy {name}: {what.removeprefix(prefix)} [dry run: {scenario}; engines {cluster}]"
        )


@asynccontextmanager
async def trial(
    bound: Bound,
    roles: Sequence[Role],
    dies_after: list[int] | None = None,
    *,
    like: Sequence[FleetEngine] = (),
    whole: Sequence[FleetEngine] = (),
) -> AsyncIterator[Trial]:
    """A trial on virtual engines with `roles`; `dies_after` as of `VirtualCalls`.

    They are `like` the engines of a fleet, in turn; together they imitate a `whole` one.
    """
    fleet = VirtualFleet(call_s=CALL_S, most_at_once=1)
    if dies_after:
        fleet.dies_after = dies_after
    for i, role in enumerate(roles):
        config, kind = EngineConfig(engine_id=f"sim-{i}", role=role), EngineKind()
        if like:
            one = like[i % len(like)]
            config = replace(config, page_size=one.page_size)
            kind = EngineKind(tuple(one.capabilities), one.kv)
        fleet.add(config, PROFILE, kind)
    async with simulated_router(bound, fleet, CONFIG) as router:
        yield Trial(router, roles, whole or like, bool(whole))


def _prompt(length: int) -> list[int]:
    """Return a prompt with no prefix in common with those of other lengths."""
    return [1 + (length * 131 + 7 * i) % 900 for i in range(length)]


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - MOST_ENGINES} more"] if len(names) > MOST_ENGINES else []
    return ", ".join([*names[:MOST_ENGINES], *more])
