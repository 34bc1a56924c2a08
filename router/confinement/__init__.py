"""Runs a function that runs code of users, in a process of its own with limits of time and memory.

Imports `base`. That is not a sandbox: see "What an upload may do" in docs/strategies.md.
"""

from router.confinement.process import Ended, run_confined

__all__ = ["Ended", "run_confined"]
