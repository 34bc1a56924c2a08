"""`EngineCalls` to a plain OpenAI server, of which only `start_generate` does anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, NoReturn

import orjson

from engine.protocol import (
    EngineState,
    EngineStatistics,
    EngineTimeline,
    LendHomeReply,
    ModelInfo,
    NoCapacity,
    PageCounts,
    PrefixChange,
    PrepRecvReply,
    RemoteSendReply,
    Unsupported,
)
from router.base import EngineUnreachable, NobodyListens
from router.engines.api import Headers
from router.engines.http_client import HttpClient
from router.engines.openai.address import ServerAddress
from router.engines.openai.answer import Answer, Asked
from router.engines.openai.completion import Completion
from router.engines.openai.description import PAGE, Descriptions
from router.engines.openai.dialect import Dialect, request_of
from router.engines.openai.probe import probed
from router.engines.openai.server import Server
from router.engines.openai.transcript import Transcript
from router.engines.openai.vocabulary import Vocabulary

__all__ = ["OpenAIEngine"]

DEFAULT_MAX_TOKENS = 16
TAIL = 64  # tokens of the prompt on which the text after it may depend
# Of a text, the tokenizer may make more tokens than the server has sampled: several of what begins
# in the middle of a character, for instance. Only an answer that is longer than that is cut.
SPARE, SPARE_SHARE = 16, 0.25
FULL_S = 1.0  # until a full server is tried again
NO_PAGES = PageCounts(total=0, free=0, cached=0, leased=0, active=0, quarantined=0, pinned=0)


class OpenAIEngine:
    """Calls to the OpenAI server at `url`. `http` is a client of `ServerAddress.base`.

    The server is asked what it knows when its model is read, before it gets requests. Every method
    raises `EngineUnreachable` if the server cannot be reached or is lost during the call, and
    otherwise the error of its reply; calls about KV raise `Unsupported`. Cancellation, and `abort`
    of a stream, close the connection, by which such servers notice that nobody waits any more.
    """

    def __init__(
        self,
        address: ServerAddress,
        http: HttpClient,
        descriptions: Descriptions,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """`tasks` is the parent of the tasks that read the streams; they do not raise."""
        self.url = address.url
        self._address = address
        self._http = http
        self._server = Server(address, http)
        self._descriptions = descriptions
        self._tasks = tasks
        self._model: ModelInfo | None = None
        self._vocabulary: Vocabulary | None = None
        self._dialect: Dialect | None = None
        self._bos: int | None = None
        self._running = 0  # streams
        self._heard: dict[Completion, int | None] = {}  # events of each, at the latest look
        # Such servers name no epoch. One that refuses connections has ended: the next is another.
        self._epoch = 1
        self._gone = False

    async def start_generate(self, body: dict[str, Any], headers: Headers) -> Completion:
        """Start a generation; returns once the server sends its answer."""
        vocabulary, dialect = self._vocabulary, self._dialect
        if vocabulary is None or dialect is None:
            raise EngineUnreachable(f"{self.url} is used before it is known")
        most = self._address.max_streams
        if self._running >= most:
            raise NoCapacity(f"{most} streams from {self.url} are open", retry_after_s=FULL_S)
        request = request_of(body, dialect, vocabulary, self._bos)
        prompt, output = body["prompt"], body.get("output") or []
        skip_special = bool(body.get("skip_special_tokens", True))
        transcript = Transcript(
            vocabulary, [*prompt[-TAIL:], *output], told=dialect.ids != "text",
            skip_special=skip_special, most=_most_remade(request["max_tokens"]),
        )  # fmt: skip
        asked = Asked(
            prompt=len(prompt),
            before=len(output),
            max_tokens=request["max_tokens"],
            logprobs=body.get("logprobs"),
            ids=dialect.ids,
            chunk_tokens=body.get("stream_tokens", 1),
            interval_s=body.get("stream_ms", 0.0) / 1000,
        )
        completion = Completion(
            asked, Answer(asked, transcript, vocabulary), lambda: self._ended(completion)
        )
        self._running += 1
        self._heard[completion] = -1  # it is work until it has been silent for a while
        completion.begin(self._tasks, self._http, orjson.dumps(request), headers)
        await completion.accepted()
        return completion

    def _ended(self, completion: Completion) -> None:
        self._running -= 1
        self._heard.pop(completion, None)

    def _moving(self) -> int:
        """Return how many streams have sent something since the latest look."""
        before, self._heard = self._heard, {one: one.progress() for one in self._heard}
        return sum(now != before[one] for one, now in self._heard.items())

    async def release(self, body: dict[str, Any], headers: Headers) -> None:
        """Nothing is held: an aborted stream has closed its connection."""

    async def model(self) -> ModelInfo:
        """Return the description of the model, and find out how the server is spoken to.

        Raises `Conflict` if the description is not to be had: the message says what to do.
        """
        card = await self._server.card()
        info = self._descriptions.describe(card, await self._server.context(card))
        known, vocabulary = self._model, self._vocabulary
        if known is None or vocabulary is None or known.tokenizer_json != info.tokenizer_json:
            vocabulary = await asyncio.to_thread(Vocabulary, info.tokenizer_json, info.vocab_size)
        dialect = await probed(self._http, card.name, vocabulary, owner=card.owner)
        self._model, self._vocabulary, self._dialect = info, vocabulary, dialect
        self._bos = vocabulary.id_of(info.bos_token) if info.add_bos else None
        return info

    async def state(self) -> EngineState:
        """Return what is known: load from the server's metrics, else this router's streams.

        Of these, only the ones that have sent something since the latest call: others would say of
        a server that hangs that it works. There are no pages and no leases that anybody knows of.
        """
        gauges = await self._server.gauges()
        return EngineState(
            engine_id=self.url.split("//")[-1][:256],
            epoch=self._epoch,
            role="any",
            model=self._model.name if self._model is not None else "",
            page_size=PAGE,
            pages=NO_PAGES,
            running=gauges.running if gauges is not None else self._moving(),
            waiting=gauges.waiting if gauges is not None else 0,
            leases=[],
            puts_in_flight=0,
            prefix_tokens=0,
        )

    async def health(self) -> None:
        """Return if the server answers. One that refused connections before is taken for new."""
        try:
            await self._server.health()
        except NobodyListens:
            self._gone = True
            raise
        self._epoch += self._gone
        self._gone = False

    def close(self) -> None:
        """Close each connection when its call ends."""
        self._http.retire()

    async def prep_recv(self, body: dict[str, Any], headers: Headers) -> PrepRecvReply:
        self._refuse("prep_recv")

    async def remote_send(self, body: dict[str, Any], headers: Headers) -> RemoteSendReply:
        self._refuse("remote_send")

    async def mirror(self, body: dict[str, Any], headers: Headers) -> None:
        self._refuse("mirror")

    async def commit(self, body: dict[str, Any], headers: Headers) -> None:
        self._refuse("commit")

    async def pin(self, body: dict[str, Any], headers: Headers) -> int:
        self._refuse("pin")

    async def unpin(self, body: dict[str, Any], headers: Headers) -> int:
        self._refuse("unpin")

    async def set_creditors(self, body: dict[str, Any], headers: Headers) -> None:
        self._refuse("lend/creditors")

    async def bring_home(self, body: dict[str, Any], headers: Headers) -> LendHomeReply:
        self._refuse("lend/home")

    async def prefixes(self) -> AsyncGenerator[PrefixChange, None]:
        """Raise `Unsupported`."""
        self._refuse("prefixes")
        yield  # type: ignore[unreachable]  # it is a generator

    async def statistics(self) -> EngineStatistics:
        self._refuse("statistics")

    async def timeline(self, seconds: float) -> EngineTimeline:
        self._refuse("timeline")

    def _refuse(self, call: str) -> NoReturn:
        raise Unsupported(f"{self.url} is a plain OpenAI server: it has no {call}", code=call)


def _most_remade(max_tokens: int) -> int:
    """Return how many tokens may be made from the text of an answer of `max_tokens`."""
    return max_tokens + SPARE + int(SPARE_SHARE * max_tokens)
