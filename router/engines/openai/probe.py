"""Finds out how an OpenAI server is spoken to, by some requests for one token each.

Servers do not tell which fields they know, and most ignore the others, which would change what a
client asked for. So each field is tried with a value of a wrong type: a server that knows the field
refuses it. Of a server that refuses unknown fields too, a field is known if a good value passes.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import orjson

from engine.protocol import BadRequest
from router.base import EngineUnreachable, root_cause
from router.engines.http_client import HttpClient, Reply
from router.engines.openai.dialect import EXTENSIONS, STRUCTURES, Dialect, request_of
from router.engines.openai.errors import REFUSED, error_of
from router.engines.openai.events import BY_ID, Part, read_event
from router.engines.openai.vocabulary import Vocabulary

__all__ = ["COMPLETIONS", "probed"]

COMPLETIONS = "/v1/completions"
AT_ONCE = 4  # requests
ANSWER = 1 << 20  # bytes
# Several tokens: vLLM ends at a first prompt of one token, on processors with matrix tiles (AMX).
TEXT = "one two three four five six seven eight nine ten eleven twelve"
REFUSES_TEXT_TOO = REFUSED | {404, 500, 501}
# Fields with a value of a wrong type and a good one.
TRIED: dict[str, tuple[Any, Any]] = {
    **{name: (wrong, usual) for name, (usual, wrong) in EXTENSIONS.items()},
    "top_k": ("none", 1),
    "return_token_ids": ("none", True),
    "return_tokens_as_token_ids": ("none", True),
    **dict.fromkeys(STRUCTURES, (5, "a")),
    "structured_outputs": ({"regex": 5}, {"regex": "a"}),  # of 5 alone vLLM makes a 500
    "response_format": ({"type": "none"}, {"type": "json_object"}),
    "json_schema": (5, {"type": "object"}),
    "guided_json": (5, {"type": "object"}),
    "guided_grammar": (5, 'root ::= "a"'),
    "ebnf": (5, 'root ::= "a"'),
    "grammar": (5, 'root ::= "a"'),
}
# llama.cpp takes its default for a value of a wrong type, and logs it. It knows these.
CARELESS = {"llamacpp": frozenset({"top_k", "min_p", "ignore_eos", "grammar", "json_schema"})}


async def probed(
    http: HttpClient, model: str, vocabulary: Vocabulary, *, owner: str = ""
) -> Dialect:
    """Return the dialect of the server. `owner` is what it calls itself in `/v1/models`.

    Raises the error of a server that refuses a plain request, and what the calls raise.
    """
    probe = _Probe(http, model, vocabulary)
    prompts = await probe.prompts()
    if (known := CARELESS.get(owner)) is None:
        known = await probe.fields()
    return Dialect(model, prompts, await probe.ids(known), known)


class _Probe:
    def __init__(self, http: HttpClient, model: str, vocabulary: Vocabulary) -> None:
        self._http = http
        self._vocabulary = vocabulary
        self._prompt = next(iter(vocabulary.encodings(TEXT)), []) or [0]
        self._body: dict[str, Any] = {
            "model": model, "prompt": self._prompt, "max_tokens": 1, "temperature": 0,
        }  # fmt: skip
        self._room = asyncio.Semaphore(AT_ONCE)

    async def prompts(self) -> Literal["tokens", "text"]:
        """Return whether the server takes token ids. Raises its error if it takes text neither."""
        reply = await self._ask()
        if reply.status == 200:
            return "tokens"
        if reply.status not in REFUSES_TEXT_TOO:
            raise error_of(reply.status, reply.body, reply.retry_after)
        self._body["prompt"] = self._vocabulary.text(self._prompt)
        text = await self._ask()
        if text.status != 200:  # then something else is wrong
            raise error_of(reply.status, reply.body, reply.retry_after)
        return "text"

    async def fields(self) -> frozenset[str]:
        """Return the fields that the server knows."""
        strict = not await self._accepts(microserve_probe=1)
        try:
            async with asyncio.TaskGroup() as tasks:
                tries = {
                    name: tasks.create_task(self._accepts(**{name: good if strict else wrong}))
                    for name, (wrong, good) in TRIED.items()
                }
        except ExceptionGroup as errors:
            raise root_cause(errors) from errors
        return frozenset(name for name, one in tries.items() if one.result() is strict)

    async def ids(self, known: frozenset[str]) -> Literal["token_ids", "logprobs", "text"]:
        """Return where the server tells the tokens of a stream, sent as real requests are."""
        dialect = Dialect(str(self._body["model"]), "tokens", "text", known)
        call = {"prompt": self._prompt, "max_tokens": 1, "temperature": 0.0}
        body = request_of(call, dialect, self._vocabulary) | {"prompt": self._body["prompt"]}
        if "return_token_ids" in known:
            parts = await self._stream({**body, "return_token_ids": True})
            if any(part.token_ids for part in parts):
                return "token_ids"
        named = {"logprobs": 1}
        if "return_tokens_as_token_ids" in known:
            named["return_tokens_as_token_ids"] = True
        try:
            parts = await self._stream({**body, **named})
        except BadRequest:  # it has none: a plain request must pass
            await self._stream(body)
            return "text"
        told = [part.logprobs for part in parts if part.logprobs]
        return "logprobs" if told and all(map(_tells_ids, told)) else "text"

    async def _stream(self, body: dict[str, Any]) -> list[Part]:
        reply = await self._post(body)
        if reply.status != 200:
            raise error_of(reply.status, reply.body, reply.retry_after)
        events = [read_event(line.rstrip(b"\r")) for line in reply.body.split(b"\n")]
        parts = [part for one in events if one and one != "done" for part in one.choices]
        if not parts:
            raise EngineUnreachable("the server sends no stream of events")
        return parts

    async def _accepts(self, **fields: Any) -> bool:
        reply = await self._ask(**fields)
        if reply.status == 200:
            return True
        if reply.status not in REFUSED and reply.status != 500:
            raise error_of(reply.status, reply.body, reply.retry_after)
        return False

    async def _ask(self, **fields: Any) -> Reply:
        return await self._post({**self._body, **fields})

    async def _post(self, body: dict[str, Any]) -> Reply:
        data = orjson.dumps(body)
        async with self._room:
            try:
                return await self._http.call("POST", COMPLETIONS, data, most=ANSWER)
            except EngineUnreachable:  # after a refusal, some servers close the connection
                return await self._http.call("POST", COMPLETIONS, data, most=ANSWER)


def _tells_ids(logprobs: dict[str, Any]) -> bool:
    content = logprobs.get("content")
    if isinstance(content, list):
        return all(isinstance(one, dict) and isinstance(one.get("id"), int) for one in content)
    names = logprobs.get("tokens") or ()
    return bool(names) and all(str(name).startswith(BY_ID) for name in names)
