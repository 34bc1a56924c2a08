"""A worker: a process with a part of the weights, which computes its part of each step.

`python -m engine.workers.part` is the process that workers are forked from. May import `exchange`.
"""
