"""A router without HTTP in front of engines in virtual time.

Imports `execution` and the rooms below it, and `engine.virtual` and `engine.latency`.
"""

from router.simulation.fleet import VirtualCalls, VirtualFleet

__all__ = ["VirtualCalls", "VirtualFleet"]
