"""Click options: made from the fields of a config, listed by topic in `--help`, and their values.

Imports no other room of the command line.
"""

from router.cli.options.config_fields import config_options, given
from router.cli.options.grouped import CONTEXT, GroupedCommand, GroupedOption, option
from router.cli.options.lazy import LazyGroup
from router.cli.options.values import (
    CA_HELP,
    ModelName,
    Number,
    ServerUrl,
    StrategyName,
    read_ca,
    read_params,
    split_flags,
    with_vllm_flags,
)

__all__ = [
    "CA_HELP",
    "CONTEXT",
    "GroupedCommand",
    "GroupedOption",
    "LazyGroup",
    "ModelName",
    "Number",
    "ServerUrl",
    "StrategyName",
    "config_options",
    "given",
    "option",
    "read_ca",
    "read_params",
    "split_flags",
    "with_vllm_flags",
]
