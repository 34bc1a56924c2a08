"""The models that names on the command line refer to, and the package's public interface."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
from model_helpers import hf_model, load, save_folder

import engine.models
from engine.models import DownloadFailed, ModelError, UnknownModel, errors, prepare_model


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=60,
    )


@pytest.mark.parametrize(
    "name", ["nonsense", "no/such/folder", "./nothing", "missing.gguf", "a/missing.gguf", "", "/x"]
)
def test_unknown_name(name):
    with pytest.raises(UnknownModel, match="neither an alias"):
        load(name)


def test_an_alias_wins_over_a_folder(tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load("tiny").config.vocab_size == 512


def test_name_is_as_typed(tmp_path, monkeypatch):
    save_folder(hf_model("Llama", num_hidden_layers=1), tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    assert load("./m").name == "./m"


def test_hub_id_is_a_snapshot_folder(tmp_path, monkeypatch):
    folder = save_folder(hf_model("Qwen3", num_hidden_layers=1), tmp_path)
    asked = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, tuple(allow_patterns)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model = load("some-org/Some_Model-1.5B")
    assert model.name == "some-org/Some_Model-1.5B"
    assert model.config.architecture == "qwen3"
    [(name, patterns)] = asked
    assert name == "some-org/Some_Model-1.5B"
    assert {"config.json", "tokenizer.json", "model-*.safetensors"} < set(patterns)


@pytest.mark.processes
@pytest.mark.slow
def test_hub_offline(tmp_path):
    """An empty cache gives a clear error at once; a filled one gives the model."""
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = python("-m", "engine.models", "org/name", **environment)
    assert result.returncode == 1
    assert result.stderr.startswith("'org/name' is not a folder here and could not be downloaded")
    assert "Traceback" not in result.stderr

    repository = tmp_path / "hub" / "models--org--name"
    save_folder(hf_model("Llama", num_hidden_layers=1), repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    code = (
        "import sys, torch, engine.models as m;"
        "print(m.load_model('org/name', dtype=torch.float32, device=torch.device('cpu')).name);"
        "print('transformers' in sys.modules)"  # only the tests depend on it
    )
    result = python("-c", code, **environment)
    assert result.stdout.split() == ["org/name", "False"], result.stderr


def test_hub_failure_is_ours(monkeypatch):
    import httpx

    for error in (httpx.ConnectError("no route"), OSError("disk full"), ValueError("bad id")):

        def fail(*_: object, error: Exception = error, **__: object) -> str:
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(DownloadFailed, match=str(error)):
            prepare_model("org/name")


@pytest.mark.processes
@pytest.mark.slow
def test_preparing_needs_no_torch():
    code = (
        "import sys; from engine.models.__main__ import main; main(['tiny']);"
        "print([m for m in ('torch', 'transformers', 'gguf', 'tokenizers') if m in sys.modules])"
    )
    result = python("-c", code)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_command_line():
    assert python("-m", "engine.models", "tiny").returncode == 0
    result = python("-m", "engine.models", "nonsense")
    assert result.returncode == 1
    assert result.stderr.startswith("no model 'nonsense'")
    assert python("-m", "engine.models").returncode == 1


def test_public_names():
    assert sorted(engine.models.__all__) == [
        "AttentionCache",
        "CorruptModel",
        "DownloadFailed",
        "Linear",
        "LoadedModel",
        "MissingFile",
        "ModelConfig",
        "ModelError",
        "ModelFolder",
        "Part",
        "Transformer",
        "UnknownModel",
        "UnsupportedArchitecture",
        "UnsupportedDtype",
        "UnsupportedTokenizer",
        "find_folder",
        "load_model",
        "prepare_model",
        "split_model",
    ]
    for name in engine.models.__all__:
        assert getattr(engine.models, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        engine.models.nothing  # noqa: B018


def test_every_error_is_in_the_tree_and_its_drawing():
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), ModelError)
        assert name in str(errors.__doc__)


def test_no_asserts_in_the_source_and_no_long_modules():
    for path in Path(inspect.getfile(engine.models)).parent.rglob("*.py"):
        source = path.read_text()
        assert "\n    assert " not in source
        assert len(source.splitlines()) <= 300


def test_the_loaded_transformer_is_ready():
    model = load("tiny", torch.bfloat16)
    assert not model.transformer.training
    for weight in model.transformer.parameters():
        assert weight.dtype == torch.bfloat16
        assert not weight.requires_grad
    assert model.transformer.cos.dtype == torch.float32
