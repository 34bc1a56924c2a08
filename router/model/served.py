"""The served model as the router needs it: tokenizer, chat template and limits, no weights."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jinja2
from tokenizers import Tokenizer

from engine.protocol import BadRequest, Internal, ModelInfo
from router.model.chat_template import ChatTemplate

__all__ = ["ServedModel"]


class ServedModel:
    """The model described by `GET /microserving/model`.

    Construction, and tokenizing long texts, take long enough to belong in a thread. Raises
    `Internal` if the engine's tokenizer or template is invalid.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.contexts: Sequence[int] = (info.context_length,)  # of the engines, ascending
        # Those of the engines that take new work now. May be called in any thread.
        self.usable_contexts: Callable[[], Collection[int]] = lambda: self.contexts
        self._tokenizer = _read_tokenizer(info)
        try:
            self._template = ChatTemplate(
                info.chat_template, bos_token=info.bos_token, eos_token=info.eos_token
            )
        except jinja2.TemplateError as error:
            raise Internal(f"the chat template of {info.name}: {error}") from error
        bos = self._tokenizer.token_to_id(info.bos_token) if info.bos_token else None
        self._bos: int | None = bos if info.add_bos else None
        self.created = int(time.time())
        self.uniform = True  # whether all engines have its very weights, dtype and layout
        digest = hashlib.sha256(info.fingerprint.encode()).hexdigest()
        self._system_fingerprint = f"fp_{digest[:10]}"

    @property
    def system_fingerprint(self) -> str | None:
        """OpenAI's field: equal ones, and seeds, promise equal answers; `None`: no promise."""
        return self._system_fingerprint if self.uniform else None

    def difference(self, info: ModelInfo) -> str:
        """Return why requests for this model cannot be served by that of `info`; empty: they can.

        They can if name, vocabulary and tokenizer are equal. Weights, dtype and the layout of KV
        may differ. Comparing tokenizers takes long enough to belong in a thread.
        """
        mine = self.info
        if info.name != mine.name:
            return f"it serves {info.name}, not the {mine.name} served here"
        if info.vocab_size != mine.vocab_size or set(info.eos_token_ids) != set(mine.eos_token_ids):
            return f"its {info.name} has another vocabulary or other EOS tokens than the one served"
        special = (info.bos_token, info.eos_token, info.add_bos)
        same = special == (mine.bos_token, mine.eos_token, mine.add_bos) and (
            info.tokenizer_json == mine.tokenizer_json or _canonical(info) == _canonical(mine)
        )
        return "" if same else f"its {info.name} has another tokenizer than the one served here"

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a prompt; with `special`, BOS is added if the model uses one."""
        # The fast variant skips the offsets of the tokens in the text; the ids are the same.
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        if special and self._bos is not None and ids[:1] != [self._bos]:
            return [self._bos, *ids]
        return ids

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] = {},
    ) -> list[int]:
        """Return the token ids of a conversation. The template writes the special tokens.

        `variables` are further ones of the template. Raises what `ChatTemplate.render` raises.
        """
        text = self._template.render(
            messages, add_generation_prompt=add_generation_prompt, variables=variables
        )
        return self.encode(text, special=False)

    def pieces(self, tokens: list[int]) -> list[str]:
        """Return each token as written in the vocabulary."""
        return [self._tokenizer.id_to_token(token) or "" for token in tokens]

    def decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def check(self, tokens: list[int], *, param: str) -> None:
        """Raise `BadRequest` for an empty prompt and for ids outside the vocabulary."""
        if not tokens:
            raise BadRequest("the prompt is empty", param=param)
        size = self.info.vocab_size
        if min(tokens) < 0 or max(tokens) >= size:
            number, wrong = next(pair for pair in enumerate(tokens) if not 0 <= pair[1] < size)
            shown = str(wrong) if abs(wrong) < 1 << 64 else "a number of more than 64 bits"
            raise BadRequest(
                f"token ids must be from 0 to {size - 1}, but element {number} is {shown}",
                param=param,
            )

    @property
    def context_length(self) -> int:
        """The longest context of an engine, prompt and output together."""
        return self.contexts[-1]

    def room(self, prompt_tokens: int, max_tokens: int | None, *, param: str) -> int:
        """Return how many tokens may follow the prompt: `max_tokens`, or all that fit.

        Without `max_tokens`, and with engines of different contexts, a smaller context counts if it
        leaves at least half of the room: more engines can take the request then. Raises
        `BadRequest` with code `context_length_exceeded` if no engine has the context.
        """
        left = self.context_length - prompt_tokens
        if left < (max_tokens or 1):
            wanted = f" and {max_tokens} for the answer" if max_tokens else ""
            raise BadRequest(
                f"the context of {self.info.name} is {self.context_length} tokens; "
                f"{prompt_tokens} are in the prompt{wanted}",
                param=param,
                code="context_length_exceeded",
            )
        if max_tokens or len(self.contexts) == 1:
            return max_tokens or left
        rooms = [context - prompt_tokens for context in self.usable_contexts()]
        most = max(rooms, default=0)
        return min(room for room in rooms if 2 * room >= most) if most > 0 else left


def _read_tokenizer(info: ModelInfo) -> Tokenizer:
    """Return the tokenizer. Raises `Internal` if it is invalid."""
    try:
        # tokenizers raises plain Exceptions.
        return Tokenizer.from_str(info.tokenizer_json)
    except BaseException as error:
        # A panic within it is no `Exception`.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise Internal(f"the tokenizer of {info.name}: {error}") from error


def _canonical(info: ModelInfo) -> str:
    """Return the tokenizer in one of the forms that mean the same; empty if it is invalid."""
    try:
        tokenizer = _read_tokenizer(info)
    except Internal:
        return ""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    text: str = tokenizer.to_str()
    return text
