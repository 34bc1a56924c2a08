"""Formats responses of both endpoints: streamed chunks and whole responses.

A chunk is formatted once per step and sequence, so the parts that do not change are bytes already.
"""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.base import Chunk

__all__ = ["DONE", "ChatFormat", "Choice", "CompletionFormat", "Format"]

DONE = b"data: [DONE]\n\n"

# Unicode line ends that do not end a line of server-sent events, though many clients split at them.
_LINE_ENDS = {
    char.encode(): b"\\u%04x" % ord(char) for char in ("\N{NEXT LINE}", "\u2028", "\u2029")
}


@dataclass(slots=True)
class Choice:
    """One choice of a whole response, as it grows."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, chunk: Chunk) -> None:
        """Append a chunk."""
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs or []
        self.finish_reason = chunk.finish_reason
        self.stop_reason = chunk.stop_reason


class Format(ABC):
    """What both endpoints share.

    `with_logprobs`, `with_ids`: the client asked for them. `echoes`: a text per choice, which
    precedes its output.
    """

    object_whole: str
    object_chunk: str
    prefix: str

    def __init__(
        self,
        request_id: str,
        model: str,
        fingerprint: str | None,
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
        """Return what precedes the first chunk of choice `index`."""
        return self._text(index, self._echoes[index]) if self._echoes else b""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """Return the event for one chunk; empty if it has nothing for the client."""
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
        """Return the event after all choices, for `stream_options.include_usage`."""
        body = {**self._base, "object": self.object_chunk, "choices": [], "usage": usage}
        return b"data: %b\n\n" % orjson.dumps(body)

    def whole(
        self, choices: list[Choice], usage: dict[str, Any], prompts: list[list[int]]
    ) -> bytes:
        """Return the whole response. `prompts`: the token ids of each choice's prompt."""
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
        """Return the fields of a streamed chunk that hold `text`."""

    @abstractmethod
    def content(self, text: str) -> dict[str, Any]:
        """Return the fields of a whole response that hold `text`."""

    @abstractmethod
    def add_prompt_ids(self, body: dict[str, Any], prompts: list[list[int]]) -> None:
        """Add the token ids of the prompts to a whole response, where vLLM has them."""

    @abstractmethod
    def logprobs(self, index: int, logprobs: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        """Return log probabilities in the form of this endpoint."""

    @abstractmethod
    def _text(self, index: int, text: str) -> bytes:
        """Return the event of a chunk that has only `text`."""


class ChatFormat(Format):
    """Of `/v1/chat/completions`."""

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
    """Of `/v1/completions`."""

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
        """Return parallel lists; `text_offset` counts characters over all chunks of a choice."""
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
    """Return `value` as JSON that every client reads as one line."""
    text = orjson.dumps(value)
    if not text.isascii():
        for end, escaped in _LINE_ENDS.items():
            text = text.replace(end, escaped)
    return text


def _name(token: dict[str, Any]) -> str:
    """Return a token's text, or its bytes if it is only a part of a character."""
    text: str = token["token"]
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token["bytes"])


class _Offset:
    """Counts where in the text tokens begin; a token may be only a part of a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0

    def next(self, token: bytes) -> int:
        """Return the offset of `token`, which follows those before it."""
        goes_on = bool(token) and 0x80 <= token[0] < 0xC0
        # An incomplete character that this token does not continue counts as one character.
        at = self._at + (bool(self._decoder.getstate()[0]) and not goes_on)
        self._at += len(self._decoder.decode(token))
        return at


def _chat_logprob(token: dict[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"], "bytes": token["bytes"]}
