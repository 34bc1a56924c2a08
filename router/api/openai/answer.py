"""From an HTTP request to its response: parses it, runs its choices, writes their chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from engine.protocol import MicroserveError
from router.api.accounting import accounted, deadline_s, priority_of
from router.api.errors import error_json
from router.api.http import HttpRequest, HttpResponse, HttpStream, off_loop
from router.api.openai.formats import DONE, ChatFormat, Choice, CompletionFormat, Format
from router.api.openai.models import served_name
from router.api.openai.parsing import ParsedRequest, read_chat, read_completion
from router.api.parts import Router
from router.base import Chunk, Request, root_cause
from router.execution import ChoiceRunner, ChoiceWriter
from router.legs import Choices
from router.model import ServedModel
from router.telemetry import Receipt

__all__ = ["chat_completions", "completions"]

# Tokens that an engine gathers into one chunk where the client waits for the whole response. If the
# engine dies, as many are computed again.
WHOLE_CHUNK = 64
EVENTS = [
    (b"Content-Type", b"text/event-stream; charset=utf-8"),
    (b"Cache-Control", b"no-cache"),
    (b"X-Accel-Buffering", b"no"),
]


async def completions(router: Router, http: HttpRequest) -> HttpResponse | None:
    """Answers to prompts, whole or as server-sent events."""
    return await _answer(router, http, read_completion, CompletionFormat)


async def chat_completions(router: Router, http: HttpRequest) -> HttpResponse | None:
    """Answers to a conversation, whole or as server-sent events."""
    return await _answer(router, http, read_chat, ChatFormat)


async def _answer(
    router: Router,
    http: HttpRequest,
    read: Callable[[bytes, ServedModel, str], ParsedRequest],
    shape: type[Format],
) -> HttpResponse | None:
    arrived, began = asyncio.get_running_loop().time(), time.monotonic()
    body = await http.read()
    model = router.registry.model
    name = served_name(router)
    parsed = await off_loop(len(body), read, body, model, name)
    del body
    http.release()
    priority = priority_of(http, parsed.priority)
    timeout_s = deadline_s(router.config, http, parsed.timeout)
    if router.changes.stale:
        await router.changes.confirm()
    revision = router.revisions.enter()
    try:
        receipt = Receipt(
            id=http.id,
            generation=revision.number,
            strategy=revision.bound.strategy.name,
            params=revision.bound.shown,
            seed=parsed.samplings[0].seed,
            prompt_tokens=sum(map(len, parsed.prompts)),
            key=http.caller.name if http.caller is not None else "",
            began=began,
        )
        router.receipts.add(receipt)
        runner = ChoiceRunner(
            execution=router.execution,
            revision=revision,
            receipt=receipt,
            headers=_trace(router, http),
            arrived=arrived,
            priority=priority,
        )
        written = shape(
            receipt.id,
            name,
            model.system_fingerprint,
            with_logprobs=parsed.samplings[0].logprobs is not None,
            with_ids=parsed.return_token_ids,
            with_usage=parsed.include_usage,
            echoes=_echoes(parsed, model) if parsed.echo else (),
        )
        answer = _Answer(router, http, parsed, receipt, runner, written, timeout_s)
        router.rollout.begun(revision, receipt)
        try:
            if parsed.stream:
                await answer.stream()
                return None
            return await answer.whole()
        finally:
            router.rollout.ended(revision, receipt)
    finally:
        router.revisions.leave(revision)


def _trace(router: Router, http: HttpRequest) -> dict[str, str]:
    """Return the headers of every leg, and begin the request's span."""
    trace = http.trace = router.tracing.begin(http.headers)
    return {"X-Request-Id": http.id, **trace.headers}


def _echoes(parsed: ParsedRequest, model: ServedModel) -> list[str]:
    """Return the prompt of each choice, as text."""
    return [text for prompt in parsed.prompts for text in [model.decode(prompt)] * parsed.n]


class _WholeWriter(ChoiceWriter):
    """Gathers a choice of a whole response."""

    __slots__ = ("choice",)

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(receipt)
        self.choice = Choice()

    def send(self, chunk: Chunk) -> None:
        self.choice.add(chunk)


class _StreamWriter(ChoiceWriter):
    """Writes the chunks of a choice to the client as they arrive."""

    __slots__ = ("_events", "_format", "_index", "_opened")

    def __init__(self, receipt: Receipt, events: HttpStream, shape: Format, index: int) -> None:
        super().__init__(receipt)
        self._events = events
        self._format = shape
        self._index = index
        self._opened = False

    def send(self, chunk: Chunk) -> Awaitable[None] | None:
        data = self._format.chunk(self._index, chunk)
        if not data:
            return None
        if not self._opened:
            self._opened = True
            data = self._format.opening(self._index) + data
        return self._events.write(data)


class _Answer:
    """The response to one request, whole or streamed."""

    def __init__(
        self,
        router: Router,
        http: HttpRequest,
        parsed: ParsedRequest,
        receipt: Receipt,
        runner: ChoiceRunner,
        written: Format,
        timeout_s: float,
    ) -> None:
        self._router = router
        self._http = http
        self._parsed = parsed
        self._receipt = receipt
        self._runner = runner
        self._format = written
        self._timeout_s = timeout_s
        self._writers: Sequence[ChoiceWriter] = ()  # prompt by prompt, choice by choice
        self._choices = [Choices(parsed.n) if parsed.n > 1 else None for _ in parsed.prompts]

    async def whole(self) -> HttpResponse:
        """Return the whole response. Raises what failed; nothing has been sent then."""
        indices = self._indices()
        writers = [_WholeWriter(self._receipt) for _ in indices]
        await self._run(writers)
        prompts = [self._parsed.prompts[index // self._parsed.n] for index in indices]
        choices = [writer.choice for writer in writers]
        body = self._format.whole(choices, self._usage(), prompts)
        return HttpResponse(body)

    async def stream(self) -> None:
        """Send the response chunk by chunk.

        Raises what fails before the first chunk, so that it becomes an HTTP status. A later failure
        becomes an error event, and `[DONE]` is not sent.
        """
        events = self._http.stream(EVENTS)
        try:
            await self._run(
                [
                    _StreamWriter(self._receipt, events, self._format, index)
                    for index in self._indices()
                ]
            )
        except MicroserveError as error:
            if not events.begun:
                raise
            await events.end(b"data: %b\n\n" % error_json(error))
            return
        last = self._format.usage(self._usage()) if self._parsed.include_usage else b""
        await events.end(last + self._timing() + DONE)

    def _timing(self) -> bytes:
        """Return where the time went, as a comment, for clients that accept event streams.

        The standard says that comments are skipped. Many clients parse every line as JSON instead,
        and do not send this `Accept`.
        """
        if "text/event-stream" not in self._http.headers.get("accept", ""):
            return b""
        return f": server-timing {self._receipt.timings().server_timing()}\n\n".encode()

    def _indices(self) -> range:
        """Return the indices of the choices of all prompts."""
        return range(len(self._parsed.prompts) * self._parsed.n)

    async def _run(self, writers: Sequence[ChoiceWriter]) -> None:
        """Run every choice of every prompt; the first failure cancels the others and is raised."""
        self._writers = writers
        router, http, runner = self._router, self._http, self._runner
        receipt, arrived, limit = runner.receipt, runner.arrived, self._timeout_s
        with accounted(router, http, receipt, arrived, limit, tally=self._tally):
            await self._run_all()

    async def _run_all(self) -> None:
        if len(self._writers) == 1:
            await self._run_choice(0)
            return
        try:
            async with asyncio.TaskGroup() as tasks:
                for index in self._indices():
                    tasks.create_task(self._run_choice(index))
        except ExceptionGroup as errors:
            raise root_cause(errors) from errors

    async def _run_choice(self, index: int) -> None:
        prompt, choice = divmod(index, self._parsed.n)
        sampling, choices = self._parsed.samplings[prompt], self._choices[prompt]
        request = Request(
            id=self._receipt.id,
            prompt=self._parsed.prompts[prompt],
            sampling=sampling.model_copy(update={"choice": choice}) if choice else sampling,
            session=self._session(),
            priority=self._runner.priority,
            chunk_tokens=1 if self._parsed.stream else WHOLE_CHUNK,
        )
        try:
            await self._runner.run(request, self._writers[index], choices)
        finally:
            if not choice and choices is not None:
                choices.over()

    def _session(self) -> str | None:
        """Return `X-Session-ID` as text that strategies can encode, whatever its bytes are."""
        session = self._http.headers.get("x-session-id")
        if session is None or session.isascii():
            return session
        return session.encode("utf-8", "surrogateescape").decode("utf-8", "replace")

    def _tally(self) -> None:
        """Note what was written in the receipt, and in the recorded traffic.

        Each prompt counts once, with what was cached of it when its first choice began.
        """
        receipt = self._receipt
        outputs = [self._tokens_of(index) for index in self._indices()[: len(self._writers)]]
        receipt.completion_tokens = sum(outputs)
        self._router.traffic.add(
            receipt.began, self._parsed.prompts, outputs, self._session(), receipt.strategy
        )
        firsts = self._writers[:: self._parsed.n]
        receipt.cached_tokens = sum(
            [
                min(writer.usage.cached_tokens, len(tokens))
                for writer, tokens in zip(firsts, self._parsed.prompts, strict=True)
                if writer.usage is not None
            ]
        )

    def _tokens_of(self, index: int) -> int:
        """Return how many tokens a choice has: as its engine says, else those that were written.

        They differ where a plain OpenAI server tells no tokens, but only their number.
        """
        writer, sampling = self._writers[index], self._parsed.samplings[index // self._parsed.n]
        if writer.usage is not None and 0 < writer.usage.completion_tokens <= sampling.max_tokens:
            return writer.usage.completion_tokens
        return len(writer.tokens)

    def _usage(self) -> dict[str, object]:
        """Return OpenAI's `usage`."""
        receipt = self._receipt
        return {
            "prompt_tokens": receipt.prompt_tokens,
            "completion_tokens": receipt.completion_tokens,
            "total_tokens": receipt.prompt_tokens + receipt.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": receipt.cached_tokens},
        }
