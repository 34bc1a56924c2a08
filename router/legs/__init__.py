"""The calls to engines for one attempt at one choice, and their cleanup.

Imports `engines` and the rooms below it.
"""

from router.legs.attempt import Attempt, Method, Running, Runtime
from router.legs.choices import Choices, Origin
from router.legs.grant import LeaseGrant
from router.legs.releaser import Releaser
from router.legs.replica import MirrorPlan, Replicas
from router.legs.token_stream import TokenStream

__all__ = [
    "Attempt",
    "Choices",
    "LeaseGrant",
    "Method",
    "MirrorPlan",
    "Origin",
    "Releaser",
    "Replicas",
    "Running",
    "Runtime",
    "TokenStream",
]
