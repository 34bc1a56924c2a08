"""`microserve top`: a fleet in a terminal. Imports `router.cli` and what it imports."""

from router.cli.on_router.top.command import top

__all__ = ["top"]
