"""Runs a strategy against virtual engines before real requests depend on it.

Imports `simulation` and the rooms below it, and `confinement`. This module imports `simulation` in
the worker only.
"""

from router.dry_run.dry_run_process import dry_run_source, dry_run_strategy
from router.dry_run.fleet_check import check_on_fleet
from router.dry_run.fleet_engine import FleetEngine

__all__ = ["FleetEngine", "check_on_fleet", "dry_run_source", "dry_run_strategy"]
