"""Latency and memory models of engines, fitted to measurements, and profiles that hold them.

May import `engine.protocol`. Imports no torch, and reads no clock.
"""

from engine.latency.fit import Fit, Measured, Residuals, doubt, fit_latency, fit_put, residuals
from engine.latency.memory import DEVICES, MODELS, Device, ModelShape, pool_tokens
from engine.latency.observed import fit_observed
from engine.latency.profile import (
    AnyLatency,
    Profile,
    find_profile,
    profile_fields,
    profile_names,
    read_profile,
    read_profile_fields,
    write_profile,
)
from engine.latency.put import PutLatency
from engine.latency.rows import padded_rows
from engine.latency.scatter import Factors, Scatter, scatter_of
from engine.latency.step import FittedLatency, FixedLatency, StepLatency, StepWork
from engine.latency.table import TableLatency
from engine.latency.tabulate import tabulate_latency

__all__ = [
    "DEVICES",
    "MODELS",
    "AnyLatency",
    "Device",
    "Factors",
    "Fit",
    "FittedLatency",
    "FixedLatency",
    "Measured",
    "ModelShape",
    "Profile",
    "PutLatency",
    "Residuals",
    "Scatter",
    "StepLatency",
    "StepWork",
    "TableLatency",
    "doubt",
    "find_profile",
    "fit_latency",
    "fit_observed",
    "fit_put",
    "padded_rows",
    "pool_tokens",
    "profile_fields",
    "profile_names",
    "read_profile",
    "read_profile_fields",
    "residuals",
    "scatter_of",
    "tabulate_latency",
    "write_profile",
]
