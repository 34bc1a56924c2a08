"""A router without HTTP in front of engines in virtual time, and experiments with it.

Imports `execution` and the rooms below it, `workload`, `engine.virtual` and `engine.latency`.
"""

from router.simulation.experiment import CONFIG, Death, Experiment, Outcome, run_experiment
from router.simulation.fleet import VirtualCalls, VirtualFleet
from router.simulation.fleet_spec import ENGINE_FLAGS, SimulatedEngine, read_fleet
from router.simulation.plot import check_plot, plot
from router.simulation.report import (
    TARGET,
    Run,
    best_run,
    show_engines,
    show_runs,
    summarize,
    sustained,
)
from router.simulation.router import SimulatedRouter, simulated_router
from router.simulation.timeline import Timeline

__all__ = [
    "CONFIG",
    "ENGINE_FLAGS",
    "TARGET",
    "Death",
    "Experiment",
    "Outcome",
    "Run",
    "SimulatedEngine",
    "SimulatedRouter",
    "Timeline",
    "VirtualCalls",
    "VirtualFleet",
    "best_run",
    "check_plot",
    "plot",
    "read_fleet",
    "run_experiment",
    "show_engines",
    "show_runs",
    "simulated_router",
    "summarize",
    "sustained",
]
