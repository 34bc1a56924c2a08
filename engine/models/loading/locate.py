"""From a model's name to its files on this machine. Imports no torch, so it is quick to start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.models.errors import DownloadFailed, UnknownModel
from engine.models.loading.smollm2 import SHA256, fetch_smollm2

__all__ = ["Source", "locate", "prepare_model"]

# Weights by their usual names only: some repositories hold a second copy under another one.
_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
]
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model's files are; `sha256` of a single file where it was verified."""

    kind: Literal["tiny", "mock", "gguf", "folder"]
    path: Path
    sha256: str | None = None


def prepare_model(name: str) -> None:
    """Fetch whatever `load_model(name)` will need, with progress on stderr.

    Raises UnknownModel or DownloadFailed.
    """
    locate(name)


def locate(name: str) -> Source:
    """The files of an alias, a folder, a `.gguf` file or a hub id, fetched if they are not here.

    An alias wins over a file of its name, and a file over a hub id.
    """
    if name == "tiny":
        return Source("tiny", Path())
    if name == "mock":
        return Source("mock", Path())
    if name == "smollm2":
        return Source("gguf", fetch_smollm2(), SHA256)
    path = Path(name).expanduser()
    if name and path.is_dir():  # an empty name would be the current folder
        return Source("folder", path)
    if path.is_file():
        return Source("gguf", path)
    if not name.endswith(".gguf") and _HUB_ID.fullmatch(name):
        return Source("folder", _hub_snapshot(name))
    raise UnknownModel(
        f"no model {name!r}: neither an alias (smollm2, tiny, mock), nor a folder or .gguf file "
        "here, nor a hub id (organisation/name)"
    )


def _hub_snapshot(name: str) -> Path:
    """The model's folder in the hub's own cache, brought up to date; offline, as it is there."""
    # Slow to import, and needed for hub ids only.
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    # The hub's errors are OSErrors or ValueErrors, the network's below them httpx's.
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DownloadFailed(
            f"{name!r} is no folder here, and could not be fetched from the hub: {reason}"
        ) from error
