"""Who may send requests, how many, and in which order: keys, limits, queue, shutdown.

Imports `strategy` and the rooms below it.
"""

from router.admission.keys import ANYBODY, Key, Keys, bearer, parse_keys
from router.admission.queue import AdmissionQueue, Place
from router.admission.rate_limit import RateLimits
from router.admission.retry_budget import Claim, RetryBudget
from router.admission.shutdown import Shutdown

__all__ = [
    "ANYBODY",
    "AdmissionQueue",
    "Claim",
    "Key",
    "Keys",
    "Place",
    "RateLimits",
    "RetryBudget",
    "Shutdown",
    "bearer",
    "parse_keys",
]
