"""A model's description without its weights: for routers in front of servers that have none."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from engine.models.loading.fields import Fields, read_json
from engine.models.loading.gguf_file import GGUFFile
from engine.models.loading.gguf_tokenizer import read_tokenization
from engine.models.loading.hf_folder import read_folder_tokenization
from engine.models.loading.locate import locate
from engine.models.loading.mock import open_mock
from engine.models.loading.tiny import open_tiny
from engine.models.loading.tokenization import Tokenization, load_tokenizer

__all__ = ["Description", "describe"]


@dataclass(frozen=True, slots=True)
class Description:
    """A tokenization, the size of the vocabulary, and the context (0: the files do not tell)."""

    tokenization: Tokenization
    vocab_size: int
    context_length: int

    def to_json(self) -> bytes:
        """Return one JSON object with the fields of the tokenization among the others."""
        sizes = {"vocab_size": self.vocab_size, "context_length": self.context_length}
        return orjson.dumps({**asdict(self.tokenization), **sizes})


def describe(name: str) -> Description:
    """Describe an alias, a folder, a `.gguf` file or a hub id, of any architecture.

    Of a folder, `tokenizer.json` suffices, and of a hub id no weights are downloaded.

    Raises: the errors of `engine.models.errors`.
    """
    source = locate(name, weights=False)
    match source.kind:
        case "tiny" | "mock":
            checkpoint = open_tiny() if source.kind == "tiny" else open_mock()
            config = checkpoint.config
            return Description(checkpoint.tokenization, config.vocab_size, config.context_length)
        case "gguf":
            return _of_gguf(source.path)
        case "folder":
            return _of_folder(source.path)


def _of_gguf(path: Path) -> Description:
    metadata = GGUFFile(path).metadata
    architecture = metadata.text("general.architecture")
    context = metadata.integer(f"{architecture}.context_length", 0)
    text = read_tokenization(metadata)
    return Description(text, _tokens(text), max(context, 0))


def _of_folder(folder: Path) -> Description:
    path = folder / "config.json"
    config = read_json(path) if path.is_file() else Fields({}, str(path))
    text = read_folder_tokenization(folder, config)
    rows = config.integer("vocab_size", 0)
    context = config.integer("max_position_embeddings", 0)
    return Description(text, max(_tokens(text), rows), max(context, 0))


def _tokens(text: Tokenization) -> int:
    used = load_tokenizer(text.tokenizer_json).get_vocab(with_added_tokens=True).values()
    return max((*used, *text.eos_token_ids), default=0) + 1
