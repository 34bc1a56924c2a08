"""The parts of one router, as the handlers use them."""

from __future__ import annotations

from dataclasses import dataclass

from router.admission.keys import Keys
from router.admission.queue import AdmissionQueue
from router.admission.rate_limit import RateLimits
from router.admission.shutdown import Shutdown
from router.base.config import RouterConfig
from router.engines.registry import Registry
from router.execution.choice_runner import Execution
from router.rollout.catalog import Catalog
from router.rollout.revisions import Revisions
from router.rollout.rollout import Rollout
from router.telemetry.events import Events
from router.telemetry.metrics import Metrics
from router.telemetry.receipts import Receipts
from router.telemetry.trace import Tracing

__all__ = ["Router"]


@dataclass(frozen=True, slots=True)
class Router:
    """Made by `router.assembly.assembled`."""

    config: RouterConfig
    registry: Registry
    catalog: Catalog
    rollout: Rollout
    receipts: Receipts
    metrics: Metrics
    execution: Execution
    keys: Keys
    limits: RateLimits
    tracing: Tracing
    shutdown: Shutdown

    @property
    def queue(self) -> AdmissionQueue:
        return self.execution.queue

    @property
    def revisions(self) -> Revisions:
        return self.rollout.revisions

    @property
    def events(self) -> Events:
        return self.rollout.events
