"""The pinned prefixes of the fleet: which ones it keeps, how many copies, and where (§3.5).

Imports `execution` and the rooms below it.
"""

from router.pins.pin import Pin
from router.pins.pins import Pins

__all__ = ["Pin", "Pins"]
