"""From an HTTP request to its answer: reads it, drives its choices, writes what they emit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from engine.protocol import MicroserveError, Usage
from router.api.accounting import accounted, deadline_s, priority_of
from router.api.http import HttpRequest, HttpResponse, off_loop
from router.api.openai.errors import error_json
from router.api.openai.formats import DONE, ChatFormat, Choice, CompletionFormat, Format
from router.api.openai.models import served_name
from router.api.openai.parsing import Ask, read_chat, read_completion
from router.api.openai.replies import ChatReply, CompletionReply
from router.api.openai.schemas import ChatRequest, CompletionRequest
from router.api.openapi import documented
from router.base.errors import root_cause
from router.base.request import Chunk, Request
from router.execution.choice_runner import ChoiceRunner
from router.legs.choices import Choices
from router.model.served import ServedModel
from router.router import Router
from router.telemetry.receipts import Receipt
from router.telemetry.timings import server_timing

__all__ = ["chat_completions", "completions"]

Emit = Callable[[int, Chunk], Awaitable[None] | None]


# Tokens that an engine gathers for a client who waits for all of them. If it dies, so many are
# computed again.
WHOLE_CHUNK = 64
# Of requests that engines work on.
GENERATES = (404, 429, 500, 502, 503, 504)
MEDIA = ("application/json", "text/event-stream")
EVENTS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


@documented(body=CompletionRequest, reply=CompletionReply, media=MEDIA, errors=GENERATES)
async def completions(router: Router, http: HttpRequest) -> HttpResponse | None:
    """Answers to prompts, whole or as server-sent events."""
    return await _answer(router, http, read_completion, CompletionFormat)


@documented(body=ChatRequest, reply=ChatReply, media=MEDIA, errors=GENERATES)
async def chat_completions(router: Router, http: HttpRequest) -> HttpResponse | None:
    """Answers to a conversation, whole or as server-sent events."""
    return await _answer(router, http, read_chat, ChatFormat)


async def _answer(
    router: Router,
    http: HttpRequest,
    read: Callable[[bytes, ServedModel, str], Ask],
    shape: type[Format],
) -> HttpResponse | None:
    arrived, began = asyncio.get_running_loop().time(), time.monotonic()
    body = await http.read()
    model = router.registry.model
    name = served_name(router)
    ask = await off_loop(len(body), read, body, model, name)
    generation = router.generations.enter()
    try:
        receipt = Receipt(
            id=http.id,
            generation=generation.number,
            strategy=generation.bound.strategy.name,
            params=generation.bound.shown,
            seed=ask.samplings[0].seed,
            prompt_tokens=sum(map(len, ask.prompts)),
            key=http.caller.name if http.caller is not None else "",
            began=began,
        )
        router.receipts.add(receipt)
        scope = ChoiceRunner(
            runtime=router.runtime,
            backlog=router.backlog,
            generation=generation,
            receipt=receipt,
            headers=_trace(router, http),
            arrived=arrived,
            priority=priority_of(http, ask.priority),
        )
        written = shape(
            receipt.id,
            name,
            model.system_fingerprint,
            with_logprobs=ask.samplings[0].logprobs is not None,
            with_ids=ask.return_token_ids,
            with_usage=ask.include_usage,
            echoes=_echoes(ask, model) if ask.echo else (),
        )
        answer = _Answer(router, http, ask, receipt, scope, written)
        router.control.begun(generation, receipt)
        try:
            if ask.stream:
                await answer.stream()
                return None
            return await answer.whole()
        finally:
            router.control.ended(generation, receipt)
    finally:
        router.generations.leave(generation)


def _trace(router: Router, http: HttpRequest) -> dict[str, str]:
    """What is passed on to the engines on every leg. The request's span begins here."""
    trace = http.trace = router.tracing.begin(http.headers)
    return {"X-Request-Id": http.id, **trace.headers}


def _echoes(ask: Ask, model: ServedModel) -> list[str]:
    """The prompt of each choice, as text."""
    return [text for prompt in ask.prompts for text in [model.decode(prompt)] * ask.n]


@dataclass(slots=True)
class _Tally:
    """What was emitted of one choice."""

    tokens: int = 0
    usage: Usage | None = None


class _Answer:
    """One answer in the making."""

    def __init__(
        self,
        router: Router,
        http: HttpRequest,
        ask: Ask,
        receipt: Receipt,
        scope: ChoiceRunner,
        written: Format,
    ) -> None:
        self._router = router
        self._http = http
        self._ask = ask
        self._receipt = receipt
        self._scope = scope
        self._format = written
        self._tallies = [_Tally() for _ in range(len(ask.prompts) * ask.n)]
        self._siblings = [Choices(ask.n) if ask.n > 1 else None for _ in ask.prompts]

    async def whole(self) -> HttpResponse:
        """The answer in one piece. Raises what went wrong; nothing has been sent then."""
        choices = [Choice() for _ in self._tallies]

        def emit(index: int, chunk: Chunk) -> None:
            choices[index].add(chunk)

        await self._drive(emit)
        prompts = [self._ask.prompts[index // self._ask.n] for index in range(len(choices))]
        body = self._format.whole(choices, self._usage(), prompts)
        return HttpResponse(body)

    async def stream(self) -> None:
        """The answer as it comes.

        Raises what goes wrong before the first chunk, so that it has an HTTP status; later it is
        an error event, and the stream has no proper end.
        """
        events = self._http.stream({**EVENTS, "X-Request-Id": self._receipt.id})
        opened: set[int] = set()

        def emit(index: int, chunk: Chunk) -> Awaitable[None] | None:
            data = self._format.chunk(index, chunk)
            if not data:
                return None
            if index not in opened:
                opened.add(index)
                data = self._format.opening(index) + data
            return events.write(data)

        try:
            await self._drive(emit)
        except MicroserveError as error:
            if not events.begun:
                raise
            events.end(b"data: %b\n\n" % error_json(error))
            return
        last = self._format.usage(self._usage()) if self._ask.include_usage else b""
        events.end(last + self._timing() + DONE)

    def _timing(self) -> bytes:
        """Where the time went, as a comment, for clients that say that they read event streams.

        By the standard it is skipped; but many clients take each line for JSON, and do not say.
        """
        if "text/event-stream" not in self._http.headers.get("accept", ""):
            return b""
        return f": server-timing {server_timing(self._receipt)}\n\n".encode()

    async def _drive(self, emit: Emit) -> None:
        """Run every choice of every prompt; the first failure cancels the others and is raised."""
        router, http, scope = self._router, self._http, self._scope
        timeout_s = deadline_s(router.config, http, self._ask.timeout)
        with accounted(router, http, scope.receipt, scope.arrived, timeout_s, tally=self._usage):
            await self._choices(emit)

    async def _choices(self, emit: Emit) -> None:
        if len(self._tallies) == 1:
            await self._choice(0, emit)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in range(len(self._tallies)):
                    tasks.create_task(self._choice(index, emit))
        except ExceptionGroup as errors:
            raise root_cause(errors) from errors

    async def _choice(self, index: int, emit: Emit) -> None:
        prompt, choice = divmod(index, self._ask.n)
        tally, receipt = self._tallies[index], self._receipt

        def count(chunk: Chunk) -> Awaitable[None] | None:
            if chunk.token_ids:
                tally.tokens += len(chunk.token_ids)
                if receipt.first_token_ms is None:
                    receipt.first_token_ms = receipt.elapsed_ms()
            if chunk.usage is not None:
                tally.usage = chunk.usage
            return emit(index, chunk)

        sampling = self._ask.samplings[prompt]
        request = Request(
            id=receipt.id,
            prompt=self._ask.prompts[prompt],
            sampling=sampling.model_copy(update={"choice": choice}) if choice else sampling,
            session=self._http.headers.get("x-session-id"),
            priority=self._scope.priority,
            siblings=self._siblings[prompt],
            chunk_tokens=1 if self._ask.stream else WHOLE_CHUNK,
        )
        try:
            await self._scope.drive(request, count)
        finally:
            if not choice and request.siblings is not None:
                request.siblings.over()

    def _usage(self) -> dict[str, object]:
        """OpenAI's `usage`: each prompt counts once, its cached part as its first choice met it."""
        receipt = self._receipt
        receipt.completion_tokens = sum(tally.tokens for tally in self._tallies)
        firsts = self._tallies[:: self._ask.n]
        receipt.cached_tokens = sum(
            min(tally.usage.cached_tokens, len(tokens))
            for tally, tokens in zip(firsts, self._ask.prompts, strict=True)
            if tally.usage is not None
        )
        return {
            "prompt_tokens": receipt.prompt_tokens,
            "completion_tokens": receipt.completion_tokens,
            "total_tokens": receipt.prompt_tokens + receipt.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": receipt.cached_tokens},
        }
