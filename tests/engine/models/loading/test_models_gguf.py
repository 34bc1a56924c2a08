"""Reading GGUF files: every type that can be dequantized, and the error for each defect."""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from model_helpers import gguf_tensors, hf_model, load, write_gguf

from engine.models import CorruptModel, ModelError, UnsupportedArchitecture, UnsupportedDtype
from engine.models.loading.gguf_file import GGUFFile

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_model("Llama", num_hidden_layers=1)


@pytest.fixture
def write(model: Any, tmp_path: Path) -> Write:
    """Return a function that writes a small valid file with the test's changes."""

    def write(
        *, arch: str = "llama", change: dict[str, Any] | None = None, **metadata: Any
    ) -> Path:
        tensors = gguf_tensors(model, "llama") | (change or {})
        tensors = {name: array for name, array in tensors.items() if array is not None}
        return write_gguf(tmp_path / "m.gguf", tensors, model.config, arch, **metadata)

    return write


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_types_are_dequantized(kind, tmp_path):
    values = np.random.default_rng(0).standard_normal((6, 64), np.float32)
    stored = gguf.quants.quantize(values, Kind[kind])
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("odd", np.ones(3, np.float32))  # so that the next tensor needs padding
    writer.add_tensor("some", stored, raw_dtype=Kind[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.shapes == {"odd": (3,), "some": (6, 64)}
    expected = torch.from_numpy(gguf.quants.dequantize(stored, Kind[kind])).float()
    assert torch.equal(file.read("some"), expected)


def test_metadata_agrees_with_the_gguf_library(write):
    path = write(tokenizer__ggml__add_bos_token=True, general__quality=0.5, general__ids=[1, 2])
    file, reader = GGUFFile(path), gguf.GGUFReader(path)
    for key, value in file.metadata.values.items():
        assert reader.fields[key].contents() == value, key


def test_digest_is_of_the_content(write):
    path = write()
    before = load(path)
    assert before.weights_digest == hashlib.sha256(path.read_bytes()).hexdigest()
    content = bytearray(path.read_bytes())
    content[-8] ^= 1
    path.write_bytes(content)
    assert load(path).weights_digest != before.weights_digest


def test_garbage(tmp_path):
    path = tmp_path / "m.gguf"
    for content in (b"", b"GG", b"GGUF", b"not a model at all", bytes(1000), random.randbytes(999)):
        path.write_bytes(content)
        with pytest.raises(CorruptModel, match=r"m\.gguf"):
            load(path)


def test_truncated_anywhere(write):
    path = write()
    content = path.read_bytes()
    cuts = random.Random(0).sample(range(1, len(content) - 32), 60)
    for cut in (*cuts, len(content) - 33):
        path.write_bytes(content[:cut])
        with pytest.raises(CorruptModel, match=r"truncated|GGUF"):
            load(path)


def test_truncation_names_tensor_and_size(write):
    path = write()
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - 1000])
    with pytest.raises(CorruptModel, match=r"truncated: tensor .* ends at byte \d+ of \d+"):
        load(path)


def test_flipped_bytes_never_escape_as_another_exception(write):
    """GGUF has no checksum, so a damaged file may load. Otherwise it raises a `ModelError`."""
    path = write()
    content = path.read_bytes()
    header = content.index(b"output_norm.weight") + 100
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(content)
        for _ in range(rng.choice((1, 1, 8))):
            damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            load(path)
        except ModelError as error:
            refused += 1
            assert str(error)
    assert refused > 50


def test_version(write):
    path = write()
    content = bytearray(path.read_bytes())
    content[4:8] = (3).to_bytes(4, "big")
    path.write_bytes(content)
    with pytest.raises(CorruptModel, match="little endian"):
        load(path)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(value, write):
    bad = np.ones(64, np.float32)
    bad[3] = value
    with pytest.raises(CorruptModel, match=r"model\.norm\.weight has values that are not finite"):
        load(write(change={"output_norm.weight": bad}))


def test_overflow_of_the_dtype(write):
    path = write(change={"output_norm.weight": np.full(64, 1e30, np.float32)})
    load(path, torch.bfloat16)
    with pytest.raises(CorruptModel, match=r"not finite in torch\.float16"):
        load(path, torch.float16)


def test_missing_tensor(write):
    with pytest.raises(CorruptModel, match=r"lack tensor model\.layers\.0\.mlp\.down_proj\.weight"):
        load(write(change={"blk.0.ffn_down.weight": None}))


def test_unknown_tensor(write):
    with pytest.raises(UnsupportedArchitecture, match=r"like blk\.0\.strange\.weight"):
        load(write(change={"blk.0.strange.weight": np.ones(3, np.float32)}))


def test_wrong_shape(write):
    message = r"model\.norm\.weight has shape \[32\], not \[64\]"
    with pytest.raises(CorruptModel, match=message):
        load(write(change={"output_norm.weight": np.ones(32, np.float32)}))


def test_stored_dtype_without_dequantizer(write):
    with pytest.raises(UnsupportedDtype, match=r"output_norm.weight is stored as I32"):
        load(write(change={"output_norm.weight": np.ones(64, np.int32)}))


@pytest.mark.parametrize("arch", ["gemma2", "phi3", "bert"])
def test_other_architecture(arch, write):
    with pytest.raises(UnsupportedArchitecture, match=f"{arch}.*supported are llama, qwen2, qwen3"):
        load(write(arch=arch))


@pytest.mark.parametrize(
    ("metadata", "error", "message"),
    [
        ({"llama__expert_count": 8}, UnsupportedArchitecture, "mixture of experts"),
        ({"llama__rope__dimension_count": 8}, UnsupportedArchitecture, "RoPE over 8"),
        ({"llama__block_count": 2}, CorruptModel, "1 layers, not 2"),
        ({"llama__block_count": 2**31}, CorruptModel, "num_layers is 2147483648"),
        ({"llama__context_length": 0}, CorruptModel, "context_length is 0"),
        ({"llama__attention__head_count": 0}, CorruptModel, "0 attention heads"),
        ({"llama__attention__head_count_kv": 3}, CorruptModel, "cannot share 3"),
        ({"llama__embedding_length": None}, CorruptModel, "lacks llama.embedding_length"),
        ({"llama__embedding_length": "x"}, CorruptModel, "should be an integer"),
        ({"llama__attention__head_count": [4, 4]}, CorruptModel, "should be an integer"),
        ({"llama__rope__freq_base": 0.0}, CorruptModel, "theta is 0.0"),
    ],
)
def test_inconsistent_metadata_is_refused(metadata, error, message, write):
    with pytest.raises(error, match=message):
        load(write(**metadata))


def test_unknown_rope_scaling(write):
    with pytest.raises(UnsupportedArchitecture, match="'longrope' is not supported"):
        load(write(llama__rope__scaling__type="longrope", llama__rope__scaling__factor=2.0))


def test_context_is_capped_to_a_sliding_window(write):
    config = load(write(llama__attention__sliding_window=100)).config
    assert (config.context_length, config.sliding_window) == (100, 100)


def test_corrupt_message_has_no_traceback_of_others(write):
    path = write()
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CorruptModel) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    assert re.match(r".*m\.gguf is not a valid GGUF file: ", str(caught.value))
