"""The events of a stream of `/v1/completions`, as far as they are read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from router.base import DONE, EngineUnreachable, TokenId, Usage
from router.engines.openai.vocabulary import Vocabulary

__all__ = ["CompletionEvent", "Part", "read_event", "read_logprobs", "usage_of"]

FINISHED: dict[str, Literal["stop", "length"]] = {
    "stop": "stop", "length": "length",
    "eos_token": "stop", "stop_sequence": "stop", "eos": "stop",  # TGI, llama.cpp
}  # fmt: skip
BY_ID = "token_id:"  # vLLM's names of tokens, with `return_tokens_as_token_ids`
MOST_TOP = 64  # alternatives of a token
MOST_NAME = 4096  # characters of a token
UNKNOWN = -1  # the id of a token that the server names by its text only
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]


class Part(msgspec.Struct):
    """What an event adds to the answer."""

    index: int = 0
    text: str | None = None
    token_ids: list[TokenId] | None = None
    logprobs: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: Annotated[int, msgspec.Meta(ge=-(2**53), lt=2**53)] | str | None = None

    @property
    def finished(self) -> Literal["stop", "length"] | None:
        """How the answer ends here, if it does. Raises `EngineUnreachable` if it was broken off."""
        if self.finish_reason is None:
            return None
        reason = FINISHED.get(self.finish_reason)
        if reason is None:
            why = self.finish_reason[:100]
            raise EngineUnreachable(f"the server ended the answer early: {why!r}")
        return reason


class _Details(msgspec.Struct):
    cached_tokens: Count | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: _Details | None = None


class CompletionEvent(msgspec.Struct):
    """One event. `error` tells of a failure, or the object `error` and its own fields (vLLM's)."""

    choices: list[Part] = []
    usage: _Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None
    code: Any = None

    @property
    def failure(self) -> dict[str, Any] | None:
        """What has failed, as an error object; None if nothing has."""
        if self.error is not None:
            return {"error": self.error}
        if self.object == "error":
            return {"error": {"message": self.message, "code": self.code}}
        return None


_DECODER = msgspec.json.Decoder(CompletionEvent)


def read_event(line: bytes) -> CompletionEvent | Literal["done"] | None:
    """Return the event of a line; None for comments and the like.

    Raises `EngineUnreachable` if it is invalid.
    """
    name, colon, data = line.partition(b":")
    if line.startswith(b'{"error"'):  # a refusal with the status of a success
        name, data = b"data", line
    elif not colon or name not in (b"data", b"error"):
        return None
    data = data.strip()
    if data == DONE:
        return "done"
    try:
        event = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as wrong:
        raise EngineUnreachable(f"the server sent an invalid event: {str(wrong)[:200]}") from None
    if name == b"error" and event.error is None:  # llama.cpp's, before it followed OpenAI
        event.error = msgspec.json.decode(data)
    return event


def usage_of(event: CompletionEvent, *, prompt: int, before: int, most: int) -> Usage | None:
    """Return the usage of a generation with `prompt` tokens, which continues after `before` others.

    `most`: what the server may have generated at most.
    """
    told = event.usage
    if told is None or told.completion_tokens is None:
        return None
    cached = (told.prompt_tokens_details or _Details()).cached_tokens or 0
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=before + min(told.completion_tokens, most),
        cached_tokens=min(cached, prompt),
    )


def read_logprobs(
    raw: dict[str, Any], vocabulary: Vocabulary, top: int, *, most: int
) -> list[dict[str, Any]]:
    """Return the log probabilities of an event, as `TokenLogprob`s in JSON form.

    Servers send them in the form of completions, or of chat (`content`). `top`: how many
    alternatives are wanted. Raises `EngineUnreachable` if they have neither form, and for those of
    more than `most` tokens.
    """
    told = raw.get("content") or raw.get("tokens")
    if isinstance(told, list) and len(told) > most:
        raise EngineUnreachable("the server sent log probabilities of more than max_tokens tokens")
    try:
        if isinstance(raw.get("content"), list):
            return [_of_chat(one, vocabulary, top) for one in raw["content"]]
        names, values = raw.get("tokens") or [], raw.get("token_logprobs") or []
        tops = raw.get("top_logprobs") or [None] * len(names)
        return [
            {
                **_named(name, value, vocabulary),
                "top": _best(
                    [
                        _named(other, logprob, vocabulary)
                        for other, logprob in _some((others or {}).items())
                    ],
                    top,
                ),
            }
            for name, value, others in zip(names, values, tops, strict=True)
        ]
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as wrong:
        raise EngineUnreachable(f"the server sent invalid logprobs: {str(wrong)[:200]}") from None


def _of_chat(one: dict[str, Any], vocabulary: Vocabulary, top: int) -> dict[str, Any]:
    others = _some(one.get("top_logprobs") or [])
    return {
        **_entry(one, vocabulary),
        "top": _best([_entry(other, vocabulary) for other in others], top),
    }


def _entry(one: dict[str, Any], vocabulary: Vocabulary) -> dict[str, Any]:
    name = one["token"]
    if isinstance(one.get("id"), int):
        name = f"{BY_ID}{one['id']}"
    return _named(name, one["logprob"], vocabulary)


def _named(name: Any, value: Any, vocabulary: Vocabulary) -> dict[str, Any]:
    """Return a token and its value. `name` is its text, its bytes (`bytes:\\xff`), or its id."""
    if not isinstance(name, str) or len(name) > MOST_NAME:
        raise TypeError("a token without a name")
    if name.startswith(BY_ID):
        token = int(name.removeprefix(BY_ID))
        if not 0 <= token < vocabulary.size:
            raise ValueError(f"token {token}, outside the vocabulary of {vocabulary.size}")
        text, data = vocabulary.piece(token)
    else:
        token, text, data = UNKNOWN, name, list(name.encode("utf-8", "replace"))
        if name.startswith("bytes:\\x"):
            data = list(bytes.fromhex(name.removeprefix("bytes:").replace("\\x", "")))
            text = bytes(data).decode("utf-8", "replace")
    # The first token of a prompt has none; nor has a token that was forbidden.
    number = float(value) if value is not None else None
    return {"token_id": token, "token": text, "bytes": data, "logprob": number}


def _some(values: Iterable[Any]) -> list[Any]:
    found = list(values)
    if len(found) > MOST_TOP:
        raise ValueError(f"{len(found)} alternatives of a token")
    return found


def _best(found: list[dict[str, Any]], top: int) -> list[dict[str, Any]]:
    """Return the likeliest `top`: servers add the sampled token to them."""
    known = [one for one in found if one["logprob"] is not None]
    return sorted(known, key=lambda one: -float(one["logprob"]))[:top]
