"""A dry run: a strategy against simulated engines, before anybody's request depends on it.

It is run on prompts short and long, cold and warm, with one engine and several; at once; cancelled
at every point of its way; and with an engine that dies in mid-stream. Each time it must yield the
very tokens that the engines emit, and leave nothing behind. Time is virtual: what takes an hour
takes none.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.protocol import MicroserveError, Sampling
from router.admission.queue import AdmissionQueue
from router.admission.retry_budget import RetryBudget
from router.base.config import RouterConfig
from router.base.errors import StrategyError, root_cause
from router.base.ids import RevisionNumber
from router.base.request import Chunk, Request
from router.engines.backend import Role
from router.engines.registry import Registry
from router.execution.choice_runner import ChoiceRunner, Execution
from router.execution.choice_writer import ChoiceWriter
from router.execution.relocation import Relocations
from router.legs.attempt import Runtime
from router.legs.releaser import Releaser
from router.rollout.revisions import Revision
from router.simulation.engine import SimulatedEngine, tokens_after
from router.simulation.virtual_time import VirtualLoop
from router.strategy.definition import Bound
from router.supervision.child_tasks import adopting
from router.supervision.violations import ViolationKind
from router.supervision.watchdog import Watchdog
from router.telemetry.events import Events
from router.telemetry.metrics import Metrics
from router.telemetry.receipts import Receipt

__all__ = ["DryRunFailed", "Stage", "dry_run", "staged"]

LENGTHS = (1, 7, 16, 17, 100, 700)
NEW = 6
CLUSTERS: tuple[tuple[Role, ...], ...] = (
    ("any",), ("any", "any"), ("prefill", "decode"), ("any", "any", "any", "any"),
    ("prefill", "prefill", "decode", "decode"),
)  # fmt: skip
CONFIG = RouterConfig(
    health_interval_s=1e6, request_timeout_s=600.0, stall_s=30.0, release_timeout_s=2.0
)
CANCELLATIONS = 64  # at most
CANCEL_STEP_S = 0.7e-3  # less than any call takes: each await is met
BLOCK_LIMIT_S = 0.1


class DryRunFailed(StrategyError):
    """What the strategy did, where in its file, and in which scene."""


def dry_run(bound: Bound) -> int:
    """Run all scenes; returns how many requests that were. Raises `DryRunFailed`.

    Has an event loop of its own; a strategy that blocks it holds up the caller.
    """
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        try:
            return runner.run(_all(bound))
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from None


async def _all(bound: Bound) -> int:
    requests = 0
    watchdog = Watchdog(Metrics(), BLOCK_LIMIT_S)
    with adopting(asyncio.get_running_loop()), watchdog.watching():
        for roles in CLUSTERS:
            async with staged(bound, roles) as stage:
                for length in LENGTHS:
                    for state in ("cold", "warm"):
                        await stage.play(f"{length} tokens, {state}", [_prompt(length)])
                await stage.play("8 requests at once", [_prompt(30 + i) for i in range(8)])
                requests += stage.requests
        for roles in CLUSTERS[1:3]:
            requests += await _cancellations(bound, roles)
            async with staged(bound, roles, fate=[NEW // 2]) as stage:
                await stage.play("an engine dies in mid-stream", [_prompt(50)])
                requests += stage.requests
    return requests


async def _cancellations(bound: Bound, roles: Sequence[Role]) -> int:
    """Cancel a request at every point of its way."""
    for number in range(CANCELLATIONS):
        async with staged(bound, roles) as stage:
            if await stage.cancel(number * CANCEL_STEP_S):
                return number
    return CANCELLATIONS


class _Discard(ChoiceWriter):
    """Keeps only the tokens."""

    def send(self, chunk: Chunk) -> None:
        pass


@dataclass(slots=True)
class Stage:
    """A router without HTTP in front of simulated engines."""

    bound: Bound
    roles: Sequence[str]
    execution: Execution
    engines: list[SimulatedEngine]
    revision: Revision
    violations: list[str]
    requests: int = 0

    async def play(self, scene: str, prompts: list[list[int]]) -> None:
        """Requests that are to succeed, at once."""
        self.requests += len(prompts)
        answers = await asyncio.gather(
            *(self.ask(prompt) for prompt in prompts), return_exceptions=True
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, MicroserveError):
                raise answer
            self._check_clean(scene)
            if isinstance(answer, MicroserveError):
                self._fail(scene, answer.message)
            wanted = list(itertools.islice(tokens_after(prompt), NEW))
            if answer != wanted:
                self._fail(scene, f"it yielded the tokens {answer}, the engines emitted {wanted}")

    async def cancel(self, after_s: float) -> bool:
        """Cancel a request after so long; whether it had ended by then."""
        scene = f"cancelled after {after_s * 1e3:.1f} ms"
        self.requests += 1
        asking = asyncio.ensure_future(self.ask(_prompt(50)))
        done, _ = await asyncio.wait([asking], timeout=after_s)
        if done:
            return True
        asking.cancel()
        await asyncio.wait([asking])
        self._check_clean(scene)
        if not asking.cancelled():
            self._fail(scene, f"it ended with {asking.exception()!r}")
        return False

    async def ask(self, prompt: list[int]) -> list[int]:
        """One request; its tokens. Raises what a client would be told."""
        receipt = Receipt(
            id=f"rehearsal-{self.requests}", generation=RevisionNumber(1),
            strategy=self.bound.strategy.name, params={}, seed=0, prompt_tokens=len(prompt),
        )  # fmt: skip
        arrived = asyncio.get_running_loop().time()
        runner = ChoiceRunner(self.execution, self.revision, receipt, {}, arrived)
        writer = _Discard(receipt)
        sampling = Sampling(max_tokens=NEW, temperature=0.0)
        request = Request(id=receipt.id, prompt=prompt, sampling=sampling, session="rehearsal")
        async with asyncio.timeout(CONFIG.request_timeout_s):
            await runner.run(request, writer)
        return writer.tokens

    def _check_clean(self, scene: str) -> None:
        if self.violations:
            self._fail(scene, self.violations[0])
        if left := [what for engine in self.engines for what in engine.busy]:
            self._fail(scene, f"it left {left[0]}")
        if any(not backend.load.idle for backend in self.execution.runtime.registry):
            self._fail(scene, "it left load behind")

    def _fail(self, scene: str, what: str) -> None:
        name, cluster = self.bound.strategy.name, "+".join(self.roles)
        prefix = f"{self.revision.label}: "
        raise DryRunFailed(
            f"strategy {name}: {what.removeprefix(prefix)} [dry run: {scene}; engines {cluster}]"
        )


@asynccontextmanager
async def staged(
    bound: Bound, roles: Sequence[Role], fate: list[int] | None = None
) -> AsyncIterator[Stage]:
    """A router's parts before simulated engines with `roles`; `fate` as of `SimulatedEngine`."""
    peers: dict[str, SimulatedEngine] = {}
    violations: list[str] = []

    def violated(revision: Revision, kind: ViolationKind, message: str) -> None:
        violations.append(message)

    engines = [
        SimulatedEngine(f"sim-{i}", peers, role=role, fate=fate) for i, role in enumerate(roles)
    ]
    async with asyncio.TaskGroup() as tasks:
        metrics = Metrics()
        relocations = Relocations()
        registry = Registry(
            CONFIG, lambda url: peers[url], tasks, Events(), on_drain=relocations.leave
        )
        for engine in engines:
            registry.add(engine.url)
        try:
            # They are met with the help of a thread, so in real time: no virtual time may pass.
            while any(backend.status != "up" for backend in registry):  # noqa: ASYNC110
                await asyncio.sleep(0)
            runtime = Runtime(CONFIG, registry, Releaser(tasks, 2.0), metrics, tasks)
            execution = Execution(runtime, AdmissionQueue(8), RetryBudget(1.0), relocations)
            revision = Revision(RevisionNumber(1), bound, None, violated)
            yield Stage(bound, roles, execution, engines, revision, violations)
        finally:
            registry.close()


def _prompt(length: int) -> list[int]:
    """Nothing in common with those of other lengths."""
    return [1 + (length * 131 + 7 * i) % 900 for i in range(length)]
