"""Models: from a name on the command line to a decoder that calls a KV cache's `attention`.

Importing this package imports no torch, so that `python -m engine.models NAME` starts at once;
the names that need it are looked up when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from engine.models.config import ModelConfig
from engine.models.errors import (
    CorruptModel,
    DownloadFailed,
    MissingFile,
    ModelError,
    UnknownModel,
    UnsupportedArchitecture,
    UnsupportedDtype,
    UnsupportedTokenizer,
)
from engine.models.prepare import prepare_model

if TYPE_CHECKING:
    from engine.models.load import LoadedModel, load_model
    from engine.models.transformer import AttentionCache, Transformer

__all__ = [
    "AttentionCache",
    "CorruptModel",
    "DownloadFailed",
    "LoadedModel",
    "MissingFile",
    "ModelConfig",
    "ModelError",
    "Transformer",
    "UnknownModel",
    "UnsupportedArchitecture",
    "UnsupportedDtype",
    "UnsupportedTokenizer",
    "load_model",
    "prepare_model",
]

_NEED_TORCH = {
    "AttentionCache": "engine.models.transformer",
    "LoadedModel": "engine.models.load",
    "Transformer": "engine.models.transformer",
    "load_model": "engine.models.load",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
