"""Engines in virtual time, and the dry run of a strategy on them.

Imports `execution` and the rooms below it.
"""
