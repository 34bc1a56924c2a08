"""Routers that share a store agree: on what runs, on the limits of keys, on the engines.

Imports `rollout`, `admission`, `engines`, `store` and the rooms below them.
"""

from router.agreement.agreement import Agreement
from router.agreement.membership import Membership
from router.agreement.presence import ROUTERS
from router.agreement.shared_limits import SharedLimits

__all__ = ["ROUTERS", "Agreement", "Membership", "SharedLimits"]
