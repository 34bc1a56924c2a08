"""How many instances of which parallelism serve a rate, by the planners of DistServe and DéjàVu.

Imports `engine.latency`, and of the router `workload` and `telemetry`. Nothing runs but functions
of virtual time.
"""

from router.planning.goodput import Attained, Evaluator, highest_rate
from router.planning.instances import (
    Division,
    Instance,
    Measured,
    fitting_instances,
    measured_model,
    profile_instances,
)
from router.planning.makespan import Job, Served, colocated, data_parallel, disaggregated
from router.planning.phases import NO_OVERHEAD, Arrival, Overhead, decode_ends, prefill_ends
from router.planning.pipelines import (
    Microbatch,
    Split,
    balanced_split,
    colocated_s,
    disaggregation_wins,
    least_machines,
    plan_split,
    streaming_overhead,
    swapping_helps,
)
from router.planning.placement import (
    Choice,
    Pair,
    Placement,
    Rated,
    high_affinity,
    low_affinity,
    most_rate,
    node_pairs,
)
from router.planning.queueing import crossover, divided_ttft, mean_ttft, pipelined_ttft
from router.planning.report import (
    fleet_of,
    placeholder,
    show_choice,
    together_command,
    up_command,
    why_not,
)
from router.planning.requests import Sample, sample_requests

__all__ = [
    "NO_OVERHEAD",
    "Arrival",
    "Attained",
    "Choice",
    "Division",
    "Evaluator",
    "Instance",
    "Job",
    "Measured",
    "Microbatch",
    "Overhead",
    "Pair",
    "Placement",
    "Rated",
    "Sample",
    "Served",
    "Split",
    "balanced_split",
    "colocated",
    "colocated_s",
    "crossover",
    "data_parallel",
    "decode_ends",
    "disaggregated",
    "disaggregation_wins",
    "divided_ttft",
    "fitting_instances",
    "fleet_of",
    "high_affinity",
    "highest_rate",
    "least_machines",
    "low_affinity",
    "mean_ttft",
    "measured_model",
    "most_rate",
    "node_pairs",
    "pipelined_ttft",
    "placeholder",
    "plan_split",
    "prefill_ends",
    "profile_instances",
    "sample_requests",
    "show_choice",
    "streaming_overhead",
    "swapping_helps",
    "together_command",
    "up_command",
    "why_not",
]
