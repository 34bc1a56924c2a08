"""Strategies on real vLLM engines, by the command that users have, in vLLM's own environment.

A few checks of one strategy. All of them take minutes for each strategy:
`microserve strategy check NAME --backend vllm`.
"""

from __future__ import annotations

import subprocess

import pytest
from engine_process import ROOT

PYTHON = ROOT / ".peers" / "vllm" / "bin" / "python"
CHECKS = ("lengths", "together", "clients_that_leave")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.thorough,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-vllm installs vLLM"),
]


def test_prefill_decode():
    only = [part for check in CHECKS for part in ("--only", check)]
    command = [str(PYTHON), "-P", "-m", "router", "strategy", "check", "prefill_decode"]
    done = subprocess.run(
        [*command, "--backend", "vllm", *only],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0
    assert done.stdout.count("\nok ") == len(CHECKS)
