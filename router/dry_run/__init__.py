"""Runs a strategy against virtual engines before real requests depend on it.

Imports `simulation` and the rooms below it, and `confinement`. This module imports `simulation` in
the worker only.
"""

from router.dry_run.dry_run_process import Problem, Tried, dry_run_source, dry_run_strategy
from router.dry_run.fleet_check import check_on_fleet, check_source
from router.dry_run.fleet_engine import FleetEngine

__all__ = [
    "FleetEngine",
    "Problem",
    "Tried",
    "check_on_fleet",
    "check_source",
    "dry_run_source",
    "dry_run_strategy",
]
