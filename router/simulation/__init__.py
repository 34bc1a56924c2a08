"""Engines in virtual time, and the dry run of a strategy on them.

Imports `execution` and the rooms below it.
"""

from router.simulation.dry_run_process import dry_run_source, dry_run_strategy

__all__ = ["dry_run_source", "dry_run_strategy"]
