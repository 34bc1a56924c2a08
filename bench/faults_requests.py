"""The requests of `bench.faults`, and what an undisturbed engine answers to them."""

from __future__ import annotations

import json
import random
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from router.base.sse import DONE, EventSplitter

__all__ = ["LONG", "SHORT", "Case", "ask", "case_of", "events", "undisturbed"]

SHORT = (5, 40, 200, 600)  # tokens of prompts
LONG = (5, 40, 200, 600, 1400, 2300, 3000)  # likewise; the last two exceed a pool of `LENT`


@dataclass
class Case:
    """A request, and the answer of an undisturbed engine."""

    prompt: list[int]
    sampling: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    text: str = ""


def case_of(number: int, lengths: Sequence[int] = SHORT) -> Case:
    """Return a request with a prompt of one of `lengths`."""
    source = random.Random(number)
    prompt = [source.randrange(10, 500) for _ in range(source.choice(lengths))]
    sampling: dict[str, Any] = {"max_tokens": source.randrange(60, 300), "ignore_eos": True}
    sampling |= source.choice(
        (
            {"temperature": 0.0},
            {"temperature": 0.9, "seed": number, "top_p": 0.95},
            {"temperature": 0.8, "seed": number, "frequency_penalty": 0.5, "top_k": 40},
            {"temperature": 1.0, "seed": number, "stop": ["Q"], "repetition_penalty": 1.1},
        )
    )
    return Case(prompt, sampling)


async def undisturbed(http: httpx.AsyncClient, url: str, case: Case) -> tuple[list[int], str]:
    """Return the tokens and the text that an engine generates."""
    body = {"request_id": secrets.token_hex(8), "prompt": case.prompt, **case.sampling}
    tokens: list[int] = []
    text = ""
    async with http.stream("POST", f"{url}/microserving/start_generate", json=body) as reply:
        async for data in events(reply):
            event = json.loads(data)
            tokens += event.get("token_ids", [])
            text += event.get("text", "")
    return tokens, text


async def ask(
    http: httpx.AsyncClient, router: str, case: Case, request_id: str
) -> tuple[list[int], str]:
    """Return what the router streams. Raises `RuntimeError` if that is not a whole answer."""
    body = {"prompt": case.prompt, "stream": True, "return_token_ids": True, **case.sampling}
    headers = {"X-Request-Id": request_id}
    tokens: list[int] = []
    text, whole = "", False
    url = f"{router}/v1/completions"
    async with http.stream("POST", url, json=body, headers=headers) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"status {reply.status_code}: {(await reply.aread())[:200]!r}")
        async for data in events(reply):
            if data == DONE:
                whole = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                tokens += choice["token_ids"] or []
                text += choice["text"]
    if not whole:
        raise RuntimeError("the stream ended without [DONE]")
    return tokens, text


async def events(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the data of each server-sent event."""
    splitter = EventSplitter()
    async for received in reply.aiter_bytes():
        for data in splitter.feed(received):
            yield data
