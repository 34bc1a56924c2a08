"""Arguments for vLLM on the command line, and on their way to the engines of `up`."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from engine.protocol import EngineConfig
from router.cli import cli
from router.cli.options import given, with_vllm_flags
from router.supervisor import as_arguments

NONE = {"backend": "microserve", "vllm_args": ""}


def test_what_follows_two_dashes_is_added_to_the_flag():
    flags = {**NONE, "backend": "vllm", "vllm_args": "--enforce-eager"}
    found = with_vllm_flags(flags, ("--block-size", "32", "a b"))
    assert found["vllm_args"] == "--enforce-eager --block-size 32 'a b'"


@pytest.mark.parametrize(
    ("flags", "extra"), [(NONE, ("x",)), ({**NONE, "vllm_args": "--block-size 32"}, ())]
)
def test_another_engine_gets_no_arguments_for_vllm(flags: dict[str, str], extra: tuple[str, ...]):
    with pytest.raises(click.UsageError, match="need --backend vllm"):
        with_vllm_flags(flags, extra)
    assert with_vllm_flags(NONE, ()) == NONE


def test_a_value_that_looks_like_a_flag_stays_one_argument():
    flags = given(EngineConfig, {"backend": "vllm", "vllm_args": "--block-size 32"})
    assert as_arguments(flags) == ["--backend", "vllm", "--vllm-args=--block-size 32"]


@pytest.mark.parametrize("command", ["engine", "up"])
def test_a_second_model_is_refused(command: str):
    found = CliRunner().invoke(cli, [command, "tiny", "tiny"])
    assert found.exit_code == 2
    assert "arguments for vLLM need --backend vllm" in found.output
