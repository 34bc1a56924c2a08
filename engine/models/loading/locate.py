"""From a model's name to its files on this machine. Does not import torch, so it starts fast."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine.models.errors import DownloadFailed, UnknownModel
from engine.models.loading.smollm2 import SHA256, fetch_smollm2

__all__ = ["Source", "locate", "prepare_model"]

# Only the usual names of weights: some repositories have a second copy under another name.
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
_HUB_DESCRIPTION = [name for name in _HUB_FILES if not name.startswith("model")]
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass(frozen=True, slots=True)
class Source:
    """The location of a model's files; `sha256` is set for a single file that was verified."""

    kind: Literal["tiny", "mock", "gguf", "folder"]
    path: Path
    sha256: str | None = None


def prepare_model(name: str) -> None:
    """Download the files that `load_model(name)` needs, with progress on stderr.

    Raises: `UnknownModel`, `DownloadFailed`.
    """
    locate(name)


def locate(name: str, *, weights: bool = True) -> Source:
    """Return the files of an alias, a folder, a `.gguf` file or a hub id; download missing ones.

    An alias has precedence over a file of the same name, and a file over a hub id. Without
    `weights`, only the files that describe the model are downloaded of a hub id.

    Raises: `UnknownModel`, `DownloadFailed`.
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
        return Source("folder", _hub_snapshot(name, _HUB_FILES if weights else _HUB_DESCRIPTION))
    raise UnknownModel(
        f"no model {name!r}: neither an alias (smollm2, tiny, mock), nor a folder or .gguf file "
        "here, nor a hub id (organisation/name)"
    )


def _hub_snapshot(name: str, files: list[str]) -> Path:
    """Return the model's folder in the hub's cache, updated unless the machine is offline.

    Raises: `DownloadFailed`.
    """
    # Imported here: they are slow to import, and only hub ids need them.
    import httpx
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=files))
    # huggingface_hub raises OSError and ValueError, the network layer below it httpx.HTTPError.
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DownloadFailed(
            f"{name!r} is not a folder here and could not be downloaded from the hub: {reason}"
        ) from error
