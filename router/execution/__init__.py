"""Runs one request: its choices, their attempts, retries, relocation and prefix migration.

Imports `rollout` and the rooms below it.
"""
