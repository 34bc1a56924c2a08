"""Runs a strategy against virtual engines before real requests depend on it.

Imports `simulation` and the rooms below it, and `confinement`. This module imports `simulation` in
the worker only.
"""

from router.dry_run.dry_run_process import dry_run_source, dry_run_strategy

__all__ = ["dry_run_source", "dry_run_strategy"]
