"""Scheduling: which tokens of which jobs the next step computes.

May import `engine.protocol` and the torch-free parts of `kvcache`. Imports no torch, starts no
thread and reads no wall clock.
"""
