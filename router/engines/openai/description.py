"""The model of OpenAI servers, which do not describe it: tokenizer and chat template.

They are those of `--openai-tokenizer`, or of an engine of the fleet that serves a model of the same
name. vLLM's `/tokenizer_info` has no vocabulary, so it cannot replace them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from engine.protocol import ModelInfo
from router.base import Conflict
from router.model import ModelFiles

__all__ = ["Descriptions", "ModelCard"]

PAGE = 16  # tokens; names of pages are made with it, though nothing is known of a server's


class ModelCard:
    """An entry of a server's `/v1/models`: the model's name, context and who serves it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.name = str(fields.get("id", ""))[:4096]
        owner = fields.get("owned_by")
        self.owner = owner[:256] if isinstance(owner, str) else ""
        context = fields.get("max_model_len")
        self.context = context if type(context) is int and 0 < context < 2**31 else 0


class Descriptions:
    """Describes the models of OpenAI servers.

    `files` are those of `--openai-tokenizer`, `context` is the value of `--openai-context`, and
    `others` returns the descriptions of the fleet's engines.
    """

    def __init__(
        self,
        files: ModelFiles | None = None,
        context: int = 0,
        others: Callable[[], Iterable[ModelInfo]] = tuple,
    ) -> None:
        self._files = files
        self._context = context
        self._others = others

    def describe(self, card: ModelCard, context: int) -> ModelInfo:
        """Return the description of a server's model. `context`: what the server says (0: nothing).

        Raises `Conflict` if there is no tokenizer for it, or no context.
        """
        files = self._files or self._of_fleet(card.name)
        if files is None:
            raise Conflict(
                f"it does not tell the tokenizer of {card.name!r}: give the router the model's "
                "folder, .gguf file, hub id or alias with --openai-tokenizer"
            )
        context = context or self._context or files.context_length
        if not context:
            raise Conflict(
                f"it does not tell the context of {card.name!r}: give it with --openai-context"
            )
        return ModelInfo(
            name=card.name,
            context_length=context,
            vocab_size=files.vocab_size,
            eos_token_ids=list(files.eos_token_ids),
            bos_token=files.bos_token,
            eos_token=files.eos_token,
            tokenizer_json=files.tokenizer_json,
            chat_template=files.chat_template,
            fingerprint=_fingerprint(card.name, files),
            page_size=PAGE,
            kv_bytes_per_token=0,
            add_bos=files.add_bos,
            capabilities=[],
        )

    def _of_fleet(self, name: str) -> ModelFiles | None:
        """Return the files of an engine that serves a model of this name, if there is one."""
        for info in self._others():
            if info.name == name:
                return ModelFiles(
                    tokenizer_json=info.tokenizer_json,
                    chat_template=info.chat_template,
                    bos_token=info.bos_token,
                    eos_token=info.eos_token,
                    eos_token_ids=tuple(info.eos_token_ids),
                    add_bos=info.add_bos,
                    vocab_size=info.vocab_size,
                    context_length=info.context_length,
                )
        return None


def _fingerprint(name: str, files: ModelFiles) -> str:
    """Return what servers of one model have in common: nobody knows their weights."""
    digest = hashlib.sha256(f"{name}\0{files.tokenizer_json}".encode()).hexdigest()
    return f"openai-{digest[:32]}"
