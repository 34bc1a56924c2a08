"""Memory lent between the registry's engines: heartbeats in, creditor lists and swaps out.

Also tells which engines have room for a context that outgrows their pools. Imports
`router.engines.backend` and `router.ledger`.
"""

from router.engines.lending.lending import Lending
from router.engines.lending.room import Rooms

__all__ = ["Lending", "Rooms"]
