"""Descriptions of models without their weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from engine.models.__main__ import main
from engine.models.errors import MissingFile, UnknownModel
from engine.models.loading.description import describe
from engine.models.loading.mock import open_mock
from engine.models.loading.tiny import open_tiny


@pytest.mark.parametrize(("name", "opened"), [("tiny", open_tiny), ("mock", open_mock)])
def test_an_alias(name, opened):
    checkpoint, described = opened(), describe(name)
    assert described.tokenization == checkpoint.tokenization
    assert described.vocab_size == checkpoint.config.vocab_size
    assert described.context_length == checkpoint.config.context_length


def test_a_folder_needs_only_its_tokenizer(tmp_path: Path):
    with pytest.raises(MissingFile):
        describe(str(tmp_path))
    text = open_tiny().tokenization
    (tmp_path / "tokenizer.json").write_text(text.tokenizer_json)
    described = describe(str(tmp_path))
    assert (described.vocab_size, described.context_length) == (512, 0)
    assert described.tokenization.chat_template is None
    config = {"architectures": ["Unheard"], "vocab_size": 640, "max_position_embeddings": 99}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"eos_token": "<|im_end|>", "chat_template": "{{ messages }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    described = describe(str(tmp_path))
    assert (described.vocab_size, described.context_length) == (640, 99)
    assert described.tokenization.eos_token_ids == (258,)
    assert described.tokenization.chat_template == "{{ messages }}"
    fields = orjson.loads(described.to_json())
    assert fields["vocab_size"] == 640 and fields["eos_token"] == "<|im_end|>"


def test_no_model():
    with pytest.raises(UnknownModel):
        describe("no-such-model")


@pytest.mark.slow
@pytest.mark.processes
def test_the_command():
    command = [sys.executable, "-m", "engine.models"]
    shown = subprocess.run([*command, "--describe", "tiny"], capture_output=True, check=True)
    assert orjson.loads(shown.stdout)["vocab_size"] == 512
    failed = subprocess.run([*command, "--describe"], capture_output=True, check=False)
    assert failed.returncode == 1 and failed.stderr


@pytest.mark.parametrize("arguments", [[], ["--describe"], ["--describe", "no-such-model"]])
def test_wrong_arguments_of_the_command(arguments: list[str]):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, str) and ended.value.code  # exits with 1, and says it
