"""Writing answers: the two shapes of a streamed chunk and of a whole answer.

A chunk is written once per step and sequence: all of it that does not change is bytes already.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.base.request import Chunk

__all__ = ["DONE", "ChatFormat", "Choice", "CompletionFormat", "Format"]

DONE = b"data: [DONE]\n\n"

# Line ends of Unicode that are none of server-sent events: many clients split at them all the same.
_LINE_ENDS = {
    char.encode(): b"\\u%04x" % ord(char) for char in ("\N{NEXT LINE}", "\u2028", "\u2029")
}


@dataclass(slots=True)
class Choice:
    """One choice of a whole answer, as it grows."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs or []
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_reason


class Format(ABC):
    """What both shapes share.

    `with_logprobs`, `with_ids`: asked for by the client; `echoes`: a text per choice that comes
    before its answer.
    """

    object_whole: str
    object_chunk: str
    prefix: str

    def __init__(
        self,
        request_id: str,
        model: str,
        fingerprint: str,
        *,
        with_logprobs: bool,
        with_ids: bool,
        with_usage: bool,
        echoes: Sequence[str] = (),
    ) -> None:
        self._base = {
            "id": f"{self.prefix}-{request_id}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._logprobs = with_logprobs
        self._ids = with_ids
        self._head = orjson.dumps({**self._base, "object": self.object_chunk})[:-1]
        self._tail = b',"usage":null}\n\n' if with_usage else b"}\n\n"
        self._echoes = echoes
        self._offsets: dict[int, _Offset] = {}

    def opening(self, index: int) -> bytes:
        """What comes before the first chunk of choice `index`."""
        return self._text(index, self._echoes[index]) if self._echoes else b""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """The event for one chunk; nothing where there is nothing to tell yet."""
        if chunk.finish_reason is None and not self._logprobs and not self._ids:
            return self._text(index, chunk.text) if chunk.text else b""
        choice: dict[str, Any] = {"index": index, **self.delta(chunk.text)}
        choice["logprobs"] = self.logprobs(index, chunk.logprobs) if self._logprobs else None
        choice["finish_reason"] = chunk.finish_reason
        if chunk.finish_reason is not None:
            choice["stop_reason"] = chunk.stop_reason
        if self._ids:
            choice["token_ids"] = chunk.token_ids
        return b'data: %b,"choices":[%b]%b' % (self._head, _line(choice), self._tail)

    def usage(self, usage: dict[str, Any]) -> bytes:
        """The event after all choices, for `stream_options.include_usage`."""
        body = {**self._base, "object": self.object_chunk, "choices": [], "usage": usage}
        return b"data: %b\n\n" % orjson.dumps(body)

    def whole(
        self, choices: list[Choice], usage: dict[str, Any], prompts: list[list[int]]
    ) -> bytes:
        """The whole answer; `prompts`: one of token ids per choice."""
        written = []
        for index, choice in enumerate(choices):
            text = "".join((*self._echoes[index : index + 1], *choice.texts))
            one: dict[str, Any] = {"index": index, **self.content(text)}
            one["logprobs"] = self.logprobs(index, choice.logprobs) if self._logprobs else None
            one["finish_reason"] = choice.finish_reason
            one["stop_reason"] = choice.stop_reason
            if self._ids:
                one["token_ids"] = choice.token_ids
            written.append(one)
        body = {**self._base, "object": self.object_whole, "choices": written, "usage": usage}
        if self._ids:
            self.add_prompt_ids(body, prompts)
        return orjson.dumps(body)

    @abstractmethod
    def delta(self, text: str) -> dict[str, Any]:
        """What a streamed chunk says of `text`."""

    @abstractmethod
    def content(self, text: str) -> dict[str, Any]:
        """What a whole answer says of `text`."""

    @abstractmethod
    def add_prompt_ids(self, body: dict[str, Any], prompts: list[list[int]]) -> None:
        """Say in a whole answer which tokens its prompts were: where vLLM says it."""

    @abstractmethod
    def logprobs(self, index: int, logprobs: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        """Log probabilities in the form of this endpoint."""

    @abstractmethod
    def _text(self, index: int, text: str) -> bytes:
        """The part of a streamed chunk that holds `text`."""


class ChatFormat(Format):
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"
    prefix = "chatcmpl"

    def opening(self, index: int) -> bytes:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return b'data: %b,"choices":[%b]%b' % (self._head, _line(choice), self._tail)

    def delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def add_prompt_ids(self, body: dict[str, Any], prompts: list[list[int]]) -> None:
        body["prompt_token_ids"] = prompts[0]

    def logprobs(self, index: int, logprobs: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        return {
            "content": [
                {**_chat_logprob(token), "top_logprobs": [_chat_logprob(t) for t in token["top"]]}
                for token in logprobs
            ],
            "refusal": None,
        }

    def _text(self, index: int, text: str) -> bytes:
        return (
            b'data: %b,"choices":[{"index":%d,"delta":{"content":%b},'
            b'"logprobs":null,"finish_reason":null}]%b'
            % (self._head, index, _line(text), self._tail)
        )


class CompletionFormat(Format):
    object_whole = "text_completion"
    object_chunk = "text_completion"
    prefix = "cmpl"

    def delta(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def add_prompt_ids(self, body: dict[str, Any], prompts: list[list[int]]) -> None:
        for choice, prompt in zip(body["choices"], prompts, strict=True):
            choice["prompt_token_ids"] = prompt

    def logprobs(self, index: int, logprobs: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        """Parallel lists; `text_offset` counts characters of the answer, over all its chunks."""
        if logprobs is None:
            return None
        offset = self._offsets.setdefault(index, _Offset())
        return {
            "tokens": [_name(token) for token in logprobs],
            "token_logprobs": [token["logprob"] for token in logprobs],
            "top_logprobs": [
                {
                    _name(token): token["logprob"],
                    **{_name(other): other["logprob"] for other in token["top"]},
                }
                for token in logprobs
            ],
            "text_offset": [offset.next(bytes(token["bytes"])) for token in logprobs],
        }

    def _text(self, index: int, text: str) -> bytes:
        return (
            b'data: %b,"choices":[{"index":%d,"text":%b,"logprobs":null,"finish_reason":null}]%b'
            % (self._head, index, _line(text), self._tail)
        )


def _line(value: object) -> bytes:
    """`value` as JSON that is one line to everybody."""
    text = orjson.dumps(value)
    if not text.isascii():
        for end, escaped in _LINE_ENDS.items():
            text = text.replace(end, escaped)
    return text


def _name(token: dict[str, Any]) -> str:
    """A token's text; of a part of a character its bytes, by which it can be told from others."""
    text: str = token["token"]
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token["bytes"])


class _Offset:
    """Where in the text tokens begin: one may be a part of a character only."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, token: bytes) -> int:
        """The offset of `token`, which follows those before it."""
        goes_on = bool(token) and 0x80 <= token[0] < 0xC0
        # A part of a character that does not go on is one by itself.
        at = self._at + (bool(self._decoder.getstate()[0]) and not goes_on)
        self._at += len(self._decoder.decode(token))
        return at


def _chat_logprob(token: dict[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"], "bytes": token["bytes"]}
