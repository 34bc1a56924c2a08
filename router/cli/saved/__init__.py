"""Commands that save what a router sends: `traffic`, `trace`. Imports the rest of `router.cli`."""

from router.cli.saved.trace import trace
from router.cli.saved.traffic import traffic

__all__ = ["trace", "traffic"]
