"""Which strategy is active: catalog, revisions, canaries, and who changed what.

`Changes` are made in one router, or in all routers that share a store (`router.agreement`).

Imports `admission`, `supervision` and the rooms below them.
"""

from router.rollout.audit_log import AuditLog
from router.rollout.canary import Canary, CanaryRules
from router.rollout.catalog import Catalog, read_source
from router.rollout.changes import Changed, Changes, LocalChanges, Wanted
from router.rollout.revisions import (
    Revision,
    Revisions,
    another_canary,
    check_generation,
    no_canary,
)
from router.rollout.rollout import FALLBACK, ITSELF, Rollout
from router.rollout.source_error import Place, SourceError

__all__ = [
    "FALLBACK",
    "ITSELF",
    "AuditLog",
    "Canary",
    "CanaryRules",
    "Catalog",
    "Changed",
    "Changes",
    "LocalChanges",
    "Place",
    "Revision",
    "Revisions",
    "Rollout",
    "SourceError",
    "Wanted",
    "another_canary",
    "check_generation",
    "no_canary",
    "read_source",
]
