"""Compares a strategy on real processes with a single engine, while clients and engines fail.

checks ──request──► router process ──► proxy ──► engine process   ×3, running the strategy
   │                 (the strategy)    │ holds a call at a hold point, so that its engine can
   │                                   │ be killed, or the client can leave, at that moment
   └─────request──► router process ─────────────► engine process   the oracle, undisturbed
"""

from router.conformance.suite import ALL, run_checks, set_up

__all__ = ["ALL", "run_checks", "set_up"]
