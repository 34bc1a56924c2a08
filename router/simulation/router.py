"""A router without HTTP in front of virtual engines: what dry runs and simulations have in common.

Everything between the API and the calls to engines is the real router's: registry, queue, retries,
legs, the supervised strategy, receipts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from engine.protocol import Timeout
from router.admission import AdmissionQueue, RetryBudget
from router.base import EngineRequestId, Request, RevisionNumber, RouterConfig
from router.engines import Registry
from router.execution import ChoiceRunner, ChoiceWriter, Execution, Relocations
from router.legs import Releaser, Runtime
from router.rollout import Revision
from router.simulation.fleet import VirtualFleet
from router.strategy import Bound
from router.supervision import ViolationKind
from router.telemetry import Events, Metrics, Receipt

__all__ = ["SimulatedRouter", "simulated_router"]


@dataclass(slots=True)
class SimulatedRouter:
    """A router in front of the engines of a fleet, with one strategy.

    `violations` collects what the strategy did that it must not.
    """

    config: RouterConfig
    fleet: VirtualFleet
    execution: Execution
    revision: Revision
    violations: list[str]

    def receipt(self, request: Request, arrived: float | None = None) -> Receipt:
        """Return the receipt of a request that `arrived` at this loop time; `None`: now."""
        clock = asyncio.get_running_loop().time
        return Receipt(
            id=request.id, generation=self.revision.number,
            strategy=self.revision.bound.strategy.name, params={}, seed=request.sampling.seed,
            prompt_tokens=len(request.prompt), began=clock() if arrived is None else arrived,
            clock=clock,
        )  # fmt: skip

    async def run(self, request: Request, writer: ChoiceWriter, receipt: Receipt) -> None:
        """Run one request. Raises the client's error; `Timeout` after `request_timeout_s`."""
        runner = ChoiceRunner(self.execution, self.revision, receipt, {}, receipt.began)
        limit_s = self.config.request_timeout_s
        try:
            async with asyncio.timeout_at(receipt.began + limit_s):
                await runner.run(request, writer)
        except TimeoutError:
            raise Timeout(f"the request took longer than {limit_s:g} s") from None
        finally:
            self.execution.queue.freed()

    def kill(self, url: str) -> None:
        """Kill an engine. The router's connections to it break, so it notices at once."""
        self.fleet.engines[url].engine.die()
        for backend in self.execution.runtime.registry:
            if backend.url == url:
                backend.probe.set()

    @property
    def left(self) -> str:
        """What ended requests have left behind, on the engines or in the router; empty: nothing."""
        for calls in self.fleet.engines.values():
            if calls.engine.alive and (busy := calls.engine.busy):
                return busy[0]
        for backend in self.execution.runtime.registry:
            if not backend.load.idle:
                return f"load on {backend.id}"
        return ""


@asynccontextmanager
async def simulated_router(
    bound: Bound, fleet: VirtualFleet, config: RouterConfig, *, name: str = "request"
) -> AsyncIterator[SimulatedRouter]:
    """A router in front of `fleet`, once all engines are up. No virtual time passes before.

    `name` begins the ids that engines see: several routers of one fleet need different ones.
    """
    violations: list[str] = []

    def violated(revision: Revision, kind: ViolationKind, message: str) -> None:
        violations.append(message)

    async with asyncio.TaskGroup() as tasks:
        metrics, releaser = Metrics(), Releaser(tasks, config.release_timeout_s)
        relocations = Relocations()
        registry = Registry(config, fleet.connect, tasks, Events(), on_drain=relocations.leave)
        for url in fleet.engines:
            registry.add(url)
        try:
            # Reading the model takes a thread, so real time: meanwhile no virtual time may pass.
            while any(backend.status != "up" for backend in registry):  # noqa: ASYNC110  see above
                await asyncio.sleep(0)
            # Names that are the same in each run.
            names = (EngineRequestId(f"{name}-{number}") for number in itertools.count())
            runtime = Runtime(config, registry, releaser, metrics, tasks, names)
            queue, retries = AdmissionQueue(config.max_queue), RetryBudget(config.retry_share)
            execution = Execution(runtime, queue, retries, relocations)
            revision = Revision(RevisionNumber(1), bound, None, violated)
            yield SimulatedRouter(config, fleet, execution, revision, violations)
        finally:
            registry.close()
            releaser.close()
