"""Who may send requests, how many, and in which order: keys, limits, queue, shutdown.

Imports `strategy` and the rooms below it.
"""
