"""A router without HTTP in front of virtual engines, with one strategy and any load."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engine.latency import Profile
from engine.protocol import EngineConfig, Sampling
from engine.virtual import EngineKind
from router.admission import AdmissionQueue, RetryBudget
from router.base import Chunk, Request, RevisionNumber, RouterConfig
from router.engines import Registry
from router.execution import ChoiceRunner, ChoiceWriter, Execution, Relocations
from router.legs import Releaser, Runtime
from router.rollout import Catalog, Revision
from router.simulation.fleet import VirtualFleet
from router.strategy import Strategy
from router.supervision import ViolationKind
from router.telemetry import Events, Metrics, Receipt

__all__ = ["VirtualDeployment", "virtual_deployment"]

CATALOG = Catalog()
TIMEOUT_S = 36_000.0


class _Tokens(ChoiceWriter):
    """Keeps the tokens."""

    def send(self, chunk: Chunk) -> None:
        pass


@dataclass(slots=True)
class VirtualDeployment:
    """A router and its virtual engines."""

    config: RouterConfig
    execution: Execution
    fleet: VirtualFleet
    revision: Revision
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def use(self, strategy: str | Strategy, **params: Any) -> None:
        """Switch the strategy."""
        self.revision = revision_of(strategy, params)

    async def complete(
        self, prompt: list[int], tokens: int, *, session: str | None = None, **sampled: Any
    ) -> tuple[list[int], Receipt]:
        """Run one request, greedy unless `sampled` says otherwise; return its tokens and its
        receipt. Raises the client's error."""
        revision, now = self.revision, asyncio.get_running_loop().time()
        bound = revision.bound
        receipt = Receipt(
            id=f"r{next(self._numbers)}", generation=revision.number, strategy=bound.strategy.name,
            params={}, seed=0, prompt_tokens=len(prompt),
        )  # fmt: skip
        writer = _Tokens(receipt)
        how = {"temperature": 0.0, **sampled}
        sampling = Sampling(max_tokens=tokens, ignore_eos=True, **how)
        request = Request(id=receipt.id, prompt=prompt, sampling=sampling, session=session)
        runner = ChoiceRunner(self.execution, revision, receipt, {}, now)
        async with asyncio.timeout(TIMEOUT_S):
            await runner.run(request, writer)
        return writer.tokens, receipt

    async def check_at_rest(self) -> None:
        """Check that nothing runs, and that every page is accounted for."""
        await asyncio.sleep(1)
        assert [what for calls in self.fleet.engines.values() for what in calls.engine.busy] == []
        assert all(backend.load.idle for backend in self.execution.runtime.registry)
        self.fleet.check_integrity()


def revision_of(strategy: str | Strategy, params: Mapping[str, Any]) -> Revision:
    def violated(revision: Revision, kind: ViolationKind, message: str) -> None:
        raise AssertionError(message)

    found = CATALOG[strategy] if isinstance(strategy, str) else strategy
    return Revision(RevisionNumber(1), found.bind(params), None, violated)


@asynccontextmanager
async def virtual_deployment(
    engines: Mapping[str, tuple[str, Profile]],
    strategy: str | Strategy,
    *,
    call_s: float = 1e-3,
    most_at_once: int | None = None,
    options: Mapping[str, Any] | None = None,
    health_interval_s: float = 1e6,
    kinds: Mapping[str, EngineKind] | None = None,
    page_sizes: Mapping[str, int] | None = None,
    **params: Any,
) -> AsyncIterator[VirtualDeployment]:
    """A router with `strategy` in front of virtual engines: by name, their role and profile.

    A strategy may be given by its name. `options` are those of the engines' configuration; `kinds`
    and `page_sizes` are those of some engines. It runs on a loop in virtual time.
    """
    fleet = VirtualFleet(call_s=call_s, most_at_once=most_at_once)
    config = RouterConfig(
        health_interval_s=health_interval_s, request_timeout_s=TIMEOUT_S, stall_s=TIMEOUT_S,
        release_timeout_s=2.0,
    )  # fmt: skip
    async with asyncio.TaskGroup() as tasks:
        metrics, releaser, relocations = Metrics(), Releaser(tasks, 2.0), Relocations()
        registry = Registry(config, fleet.connect, tasks, Events(), on_drain=relocations.leave)
        for name, (role, profile) in engines.items():
            flags = {**(options or {})}
            if page_sizes is not None and name in page_sizes:
                flags["page_size"] = page_sizes[name]
            settings = EngineConfig(engine_id=name, role=role, **flags)
            kind = (kinds or {}).get(name, EngineKind())
            registry.add(fleet.add(settings, profile, kind).url)
        try:
            while any(backend.status != "up" for backend in registry):  # noqa: ASYNC110
                await asyncio.sleep(0)
            runtime = Runtime(config, registry, releaser, metrics, tasks)
            execution = Execution(runtime, AdmissionQueue(1000), RetryBudget(1.0), relocations)
            yield VirtualDeployment(config, execution, fleet, revision_of(strategy, params))
        finally:
            registry.close()
            releaser.close()
