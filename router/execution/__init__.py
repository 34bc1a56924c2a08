"""Runs one request: its choices, their attempts, retries, relocation and prefix migration.

Imports `rollout` and the rooms below it.
"""

from router.execution.choice_runner import ChoiceRunner, Execution
from router.execution.choice_writer import ChoiceWriter
from router.execution.prefix_migration import Migrated, copy_prefix, migrate_prefix, own_attempt
from router.execution.relocation import Relocations

__all__ = [
    "ChoiceRunner",
    "ChoiceWriter",
    "Execution",
    "Migrated",
    "Relocations",
    "copy_prefix",
    "migrate_prefix",
    "own_attempt",
]
