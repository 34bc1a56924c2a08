"""What an OpenAI server tells about itself: its health, its models, its context, its load."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import orjson

from router.base import BadReply, Conflict, EngineUnreachable
from router.engines.http_client import HttpClient, Reply
from router.engines.openai.address import ServerAddress
from router.engines.openai.description import ModelCard
from router.engines.openai.errors import error_of
from router.engines.openai.gauges import Gauges, read_gauges

__all__ = ["Server"]

MOST_REPLY = 2 << 20  # bytes
MOST_METRICS = 4 << 20
METRICS_S = 2.0  # between two looks at the metrics
METRICS_WAIT_S, METRICS_REST_S = 0.5, 30.0  # for an answer; after one that did not come
NAMED = 5  # models that an error lists
ABSENT = frozenset({404, 405, 501})


class Server:
    """The calls of one server that ask for nothing to be generated.

    Each raises `EngineUnreachable` if the server cannot be reached, and the error of its reply.
    """

    def __init__(self, address: ServerAddress, http: HttpClient) -> None:
        self._address = address
        self._http = http
        self._health = "/health"
        self._gauges: Gauges | None = None
        self._told = True  # whether it has metrics, as far as is known
        self._looked = 0.0  # loop time

    async def health(self) -> None:
        """Return if the server says that it is well, or, without `/health`, lists its models."""
        reply = await self._get(self._health)
        if reply.status in ABSENT and self._health == "/health":
            self._health = "/v1/models"
            reply = await self._get(self._health)
        if reply.status != 200:
            raise error_of(reply.status, reply.body, reply.retry_after)

    async def card(self) -> ModelCard:
        """Return the entry of the served model.

        Raises `Conflict` if the server has several and the URL names none, or one that is not
        there; `BadReply` if the list is none.
        """
        self._told, self._looked = True, 0.0  # another process may have come
        reply = await self._get("/v1/models")
        wanted = self._address.model
        if reply.status in ABSENT and wanted:
            return ModelCard({"id": wanted})
        if reply.status != 200:
            raise error_of(reply.status, reply.body, reply.retry_after)
        listed = _object(reply).get("data")
        entries = listed if isinstance(listed, list) else []
        cards = [ModelCard(one) for one in entries if isinstance(one, dict) and one.get("id")]
        if not cards:
            raise BadReply(f"its /v1/models lists no model: {reply.body[:200]!r}")
        names = ", ".join(card.name[:100] for card in cards[:NAMED])
        names += f" and {len(cards) - NAMED} more" * (len(cards) > NAMED)
        if wanted:
            found = next((card for card in cards if card.name == wanted), None)
            if found is None:
                raise Conflict(f"it does not serve {wanted!r}, but {names}")
            return found
        if len(cards) > 1:
            raise Conflict(f"it serves {names}: choose one with ?model=NAME in its URL")
        return cards[0]

    async def context(self, card: ModelCard) -> int:
        """Return the longest context (tokens): of its list of models, llama.cpp's, or TGI's.

        0 if the server does not tell.
        """
        if card.context:
            return card.context
        for path, keys in (
            ("/props", ("default_generation_settings", "n_ctx")),
            ("/info", ("max_total_tokens",)),
        ):
            reply = await self._get(path)
            value: Any = None
            with suppress(BadReply):  # a page for people, say
                value = _object(reply) if reply.status == 200 else None
            for key in keys:
                value = value.get(key) if isinstance(value, dict) else None
            if type(value) is int and 0 < value < 2**31:
                return value
        return 0

    async def gauges(self) -> Gauges | None:
        """Return what the server works on, at most `METRICS_S` old; None if it does not tell."""
        now = asyncio.get_running_loop().time()
        if self._told and now - self._looked >= METRICS_S:
            self._looked = now
            try:
                async with asyncio.timeout(METRICS_WAIT_S):
                    reply = await self._http.call("GET", "/metrics", most=MOST_METRICS)
            except (EngineUnreachable, TimeoutError):  # says nothing about its health
                self._gauges, self._looked = None, now + METRICS_REST_S
            else:
                self._gauges = read_gauges(reply.body) if reply.status == 200 else None
                self._told = self._gauges is not None
        return self._gauges

    async def _get(self, path: str) -> Reply:
        return await self._http.call("GET", path, most=MOST_REPLY)


def _object(reply: Reply) -> dict[str, Any]:
    """Return the object of a reply, or an empty one. Raises `BadReply` for no JSON."""
    try:
        fields = orjson.loads(reply.body)
    except ValueError:
        raise BadReply(f"the server's reply is no JSON: {reply.body[:200]!r}") from None
    return fields if isinstance(fields, dict) else {}
