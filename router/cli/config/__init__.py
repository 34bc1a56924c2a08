"""The configuration of a fleet: its file, its checks, and what is in force with flags on top.

May import `options`, `preflight` and `serve` of the command line, and the rooms below `cli`.
"""

from router.cli.config.checks import check
from router.cli.config.commands import config_group
from router.cli.config.effective import Effective, read_effective
from router.cli.config.problems import Invalid
from router.cli.config.schema import ENGINE_OWN, KEYS_FILE

__all__ = [
    "ENGINE_OWN",
    "KEYS_FILE",
    "Effective",
    "Invalid",
    "check",
    "config_group",
    "read_effective",
]
