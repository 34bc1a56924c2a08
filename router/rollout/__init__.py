"""Which strategy is active: catalog, revisions, canaries, and who changed what.

Imports `admission`, `supervision` and the rooms below them.
"""

from router.rollout.canary import CanaryRules
from router.rollout.catalog import Catalog, read_source
from router.rollout.revisions import Revision, Revisions
from router.rollout.rollout import Rollout

__all__ = ["CanaryRules", "Catalog", "Revision", "Revisions", "Rollout", "read_source"]
