"""`load_model`: from a name to a runnable transformer with its tokenizer."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from engine.models.config import ModelConfig
from engine.models.decoder import Sum, Transformer
from engine.models.errors import UnsupportedDtype
from engine.models.loading.checkpoint import Checkpoint, assemble
from engine.models.loading.gguf_checkpoint import open_gguf
from engine.models.loading.hf_folder import open_folder
from engine.models.loading.locate import Source, locate
from engine.models.loading.mock import open_mock
from engine.models.loading.tiny import open_tiny
from engine.models.ops import ops_for
from engine.models.part import Part

__all__ = ["LoadedModel", "Quantization", "load_model"]

Quantization = Literal["none", "int8"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that is ready to run.

    `name` is as given to `load_model`; the token fields are those of `Tokenization`. `transformer`
    is None for `mock`, which has no weights, and where weights were not wanted. `weights_digest`
    (hex) identifies the stored weights, before conversion to `dtype` and quantization.
    """

    name: str
    config: ModelConfig
    transformer: Transformer | None
    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    weights_digest: str
    quantization: Quantization


def load_model(
    name: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
    weights: bool = True,
    part_of: Callable[[ModelConfig], Part] | None = None,
    sum_: Sum | None = None,
) -> LoadedModel:
    """Load an alias, a Hugging Face folder, a `.gguf` file or a hub id; download it if necessary.

    `dtype` is float32, bfloat16 or float16. Quantization requires bfloat16 on a CPU. With
    `part_of`, only the weights of that part are loaded, one tensor at a time; `sum_` is as of
    `Transformer`.

    Raises: the errors of `engine.models.errors`.
    """
    if dtype not in _DTYPES:
        raise UnsupportedDtype(
            f"{dtype} is not supported; supported are {', '.join(map(str, _DTYPES))}"
        )
    if quantization != "none" and (dtype != torch.bfloat16 or device.type != "cpu"):
        raise UnsupportedDtype(
            f"{quantization} weights are multiplied in bfloat16 on a CPU (--dtype bfloat16 "
            f"--device cpu), not in {dtype} on {device}"
        )
    source = locate(name)
    checkpoint = _open(source)
    text = checkpoint.tokenization
    text.check(checkpoint.config.vocab_size)
    return LoadedModel(
        name=name,
        config=checkpoint.config,
        transformer=None
        if source.kind == "mock" or not weights
        else _build(
            checkpoint,
            dtype,
            device,
            quantization,
            None if part_of is None else part_of(checkpoint.config),
            sum_,
        ),
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        eos_token_ids=text.eos_token_ids,
        add_bos=text.add_bos,
        weights_digest=checkpoint.digest,
        quantization=quantization,
    )


def _open(source: Source) -> Checkpoint:
    match source.kind:
        case "tiny":
            return open_tiny()
        case "mock":
            return open_mock()
        case "gguf":
            return open_gguf(source.path, source.sha256)
        case "folder":
            return open_folder(source.path)


def _build(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization,
    part: Part | None,
    sum_: Sum | None,
) -> Transformer:
    transformer = assemble(checkpoint, dtype, device, part, sum_)
    if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        with torch.inference_mode():
            if quantization == "int8":
                transformer.quantize()
            else:
                transformer.pack()
    ops_for(dtype, device)
    _trim_heap()
    return transformer


def _trim_heap() -> None:
    """Return freed memory from the C library to the system.

    Packing and quantizing free as much memory as the weights take.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
