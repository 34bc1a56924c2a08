"""Keeps user code from harming other requests: supervised tasks and the watchdog.

Imports `strategy` and the rooms below it.
"""
