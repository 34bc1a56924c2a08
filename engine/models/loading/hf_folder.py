"""Model folders in Hugging Face's layout: config, safetensors (sharded or not), tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.models.errors import CorruptModel, MissingFile, UnsupportedDtype
from engine.models.loading.checkpoint import Checkpoint, digest_files
from engine.models.loading.fields import Fields, read_json
from engine.models.loading.hf_config import read_config
from engine.models.loading.tokenization import Tokenization, load_tokenizer

__all__ = ["open_folder", "read_folder_tokenization"]

_FLOATS = {"F64", "F32", "F16", "BF16"}


def open_folder(folder: Path) -> Checkpoint:
    """Open a model folder.

    Raises: `MissingFile`, `CorruptModel`, `UnsupportedArchitecture`, `UnsupportedDtype`.
    """
    config = read_json(_required(folder, "config.json"))
    model_config = read_config(config)
    paths = _shards(folder)
    shards = [_Shard(path) for path in paths]
    owner = {name: shard for shard in shards for name in shard.shapes}
    return Checkpoint(
        config=model_config,
        tokenization=read_folder_tokenization(folder, config),
        shapes={name: shard.shapes[name] for name, shard in owner.items()},
        read=lambda name: owner[name].read(name),
        digest=digest_files(paths),
    )


class _Shard:
    """One memory-mapped safetensors file; its tensors are read one at a time."""

    def __init__(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CorruptModel(f"{path} is damaged: {error}") from error
        self.path, self.file = path, file
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(part.get_shape()) for name, part in slices.items()
        }
        for name, part in slices.items():
            if part.get_dtype() not in _FLOATS:
                raise UnsupportedDtype(
                    f"{path}: {name} is stored as {part.get_dtype()}; "
                    "only float64, float32, float16 and bfloat16 weights can be read"
                )

    def read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self.file.get_tensor(name)
        except SafetensorError as error:
            raise CorruptModel(f"{self.path} is damaged: {error}") from error
        return tensor


def _shards(folder: Path) -> list[Path]:
    """Return the weight files in a fixed order."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return [_required(folder, "model.safetensors")]
    files = read_json(index).fields("weight_map").values.values()
    names = sorted({str(file) for file in files})
    if not names or any(Path(name).name != name for name in names):
        raise CorruptModel(f"{index}: weight_map names no files of this folder")
    return [_required(folder, name) for name in names]


def _required(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        raise MissingFile(f"the model folder {folder} lacks {name}")
    return path


def read_folder_tokenization(folder: Path, config: Fields) -> Tokenization:
    """Return the tokenization of a folder. Raises: `MissingFile`, `CorruptModel`."""
    tokenizer_json = _text(_required(folder, "tokenizer.json"))
    tokenizer = load_tokenizer(tokenizer_json)
    settings = _optional(folder, "tokenizer_config.json")
    special = _optional(folder, "special_tokens_map.json")
    generation = _optional(folder, "generation_config.json")

    bos, eos = (
        _token(settings.values.get(key)) or _token(special.values.get(key))
        for key in ("bos_token", "eos_token")
    )
    ids = [*_ids(generation, "eos_token_id"), *_ids(config, "eos_token_id")]
    if eos is not None and (eos_id := tokenizer.token_to_id(eos)) is not None:
        ids.append(eos_id)
    prefix = tokenizer.encode("a").ids[:1]
    return Tokenization(
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, settings),
        bos_token=bos,
        eos_token=eos,
        eos_token_ids=tuple(dict.fromkeys(ids)),
        # tokenizer.json decides what precedes a text; `add_bos_token` is often outdated.
        add_bos=bos is not None and prefix == [tokenizer.token_to_id(bos)],
    )


def _optional(folder: Path, name: str) -> Fields:
    path = folder / name
    return read_json(path) if path.is_file() else Fields({}, str(path))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorruptModel(f"{path} cannot be read: {error}") from error


def _token(value: object) -> str | None:
    """Return the text of a special token, given as text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _ids(fields: Fields, key: str) -> list[int]:
    """Return the ids under `key`, which may be absent, one id, or a list."""
    if key not in fields:
        return []
    return fields.integers(key) if isinstance(fields.values[key], list) else [fields.integer(key)]


def _chat_template(folder: Path, settings: Fields) -> str | None:
    """Return the chat template.

    Since transformers 4.51 it is a file; before, it is a setting: one template, or several by name.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _text(path)
    value = settings.values.get("chat_template")
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None
