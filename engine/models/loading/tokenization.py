"""`Tokenization`: a model's tokenizer, chat template, and begin and end tokens."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from engine.models.errors import CorruptModel

__all__ = ["Tokenization", "load_tokenizer"]


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Hugging Face's `tokenizer.json`, and the settings that this file does not contain.

    With `add_bos`, the tokenizer itself prepends BOS to raw text.
    """

    tokenizer_json: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: tuple[int, ...]
    add_bos: bool

    def check(self, vocab_size: int) -> None:
        """Raise `CorruptModel` if a token id is outside the embedding's `vocab_size` rows."""
        used = load_tokenizer(self.tokenizer_json).get_vocab(with_added_tokens=True).values()
        highest = max((*used, *self.eos_token_ids), default=0)
        if highest >= vocab_size:
            raise CorruptModel(
                f"the tokenizer has token {highest}, the embedding only {vocab_size} rows"
            )


def load_tokenizer(tokenizer_json: str) -> Tokenizer:
    """Return the tokenizer. Raises: `CorruptModel` if this is not a `tokenizer.json`."""
    try:
        return Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # the library raises no narrower class
        raise CorruptModel(f"the tokenizer cannot be read: {error}") from error
