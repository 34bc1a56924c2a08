"""Models: from a name on the command line to a decoder that calls a KV cache's `attention`.

Importing this package does not import torch, so `python -m engine.models NAME` starts at once.
Names that need torch are imported on first use.
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
from engine.models.loading.locate import prepare_model

if TYPE_CHECKING:
    from engine.models.decoder import AttentionCache, Transformer
    from engine.models.linear import Linear
    from engine.models.loading.load import LoadedModel, load_model
    from engine.models.model_folder import ModelFolder, find_folder
    from engine.models.part import Part, split_model

__all__ = [
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

_NEED_TORCH = {
    "AttentionCache": "engine.models.decoder",
    "Linear": "engine.models.linear",
    "LoadedModel": "engine.models.loading.load",
    "ModelFolder": "engine.models.model_folder",
    "Part": "engine.models.part",
    "Transformer": "engine.models.decoder",
    "find_folder": "engine.models.model_folder",
    "load_model": "engine.models.loading.load",
    "split_model": "engine.models.part",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
