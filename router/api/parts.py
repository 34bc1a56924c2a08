"""The parts of one router, as the handlers use them."""

from __future__ import annotations

from dataclasses import dataclass

from router.admission import AdmissionQueue, Keys, RateLimits, Shutdown
from router.advice import Advisor
from router.agreement import Membership
from router.api.peers import Peers
from router.base import RouterConfig
from router.engines import Registry
from router.execution import Execution
from router.pins import Pins
from router.rollout import Catalog, Changes, Revisions, Rollout
from router.telemetry import Activity, Events, Metrics, Receipts, Tracing, Traffic

__all__ = ["Router"]


@dataclass(frozen=True, slots=True)
class Router:
    """Made by `router.assembly.assembled`."""

    config: RouterConfig
    registry: Registry
    catalog: Catalog
    rollout: Rollout
    changes: Changes
    receipts: Receipts
    traffic: Traffic
    activity: Activity
    metrics: Metrics
    execution: Execution
    pins: Pins
    keys: Keys
    limits: RateLimits
    tracing: Tracing
    shutdown: Shutdown
    advisor: Advisor
    membership: Membership | None = None  # with a store
    peers: Peers | None = None  # of a worker process

    @property
    def queue(self) -> AdmissionQueue:
        return self.execution.queue

    @property
    def revisions(self) -> Revisions:
        return self.rollout.revisions

    @property
    def events(self) -> Events:
        return self.rollout.events
