"""The pages of reference name every flag of the commands; no page names one that does not exist."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest
from test_links import CODE, PAGES, ROOT, prose

from router.cli import cli

PAGES_OF_FLAGS = ("operations.md", "planning.md", "simulation.md", "ray.md")
REFERENCE = [ROOT / "docs" / name for name in PAGES_OF_FLAGS]
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OTHERS = {"--save", "--mock", "--help", "--help-all", "--version"}  # of benches; of each command
VLLM = {"--block-size", "--kv-transfer-config", "--max-num-batched-tokens", "--max-num-seqs"}
WITH_VLLM = ("vllm.md", "operations.md")
# of docker, kubectl and useradd
OF_DEPLOYING = {"--build-arg", "--file", "--from-literal", "--now", "--system", "--tag"}
NOT_FOR_PEOPLE = {"--parent-pid", "--version"}


def flags_of(command: click.Command) -> Iterator[str]:
    """Yield the first name of each option of a command and its subcommands."""
    for option in command.params:
        if isinstance(option, click.Option):
            yield from (name for name in option.opts if name.startswith("--"))
            yield from option.secondary_opts
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            yield from flags_of(command.get_command(context, name))


KNOWN = set(flags_of(cli))


# CONTRIBUTING.md names other programs' flags.
@pytest.mark.parametrize("page", [PAGES[0], *PAGES[2:]], ids=lambda page: page.name)
def test_flags_exist(page):
    named = {flag for code in CODE.findall(prose(page)) for flag in FLAG.findall(code)}
    others = OTHERS | (VLLM if page.name in WITH_VLLM else set())
    others |= OF_DEPLOYING if page.name == "deploy.md" else set()
    assert named <= KNOWN | others


def test_the_reference_names_every_flag():
    named = {flag for page in REFERENCE for flag in FLAG.findall(page.read_text())}
    # A flag in seconds may be named without its suffix: `--stall` for `--stall-s`.
    missing = {flag for flag in KNOWN if not {flag, flag.removesuffix("-s")} & named}
    assert not missing - NOT_FOR_PEOPLE
