"""One running completion on an OpenAI server, as a stream of chunks.

    server ── events ──► Completion ── Transcript ──► chunk ──► the task that serves the request

The bytes are parsed as they arrive, in the task that makes the HTTP call. What the server sends is
bounded and checked against what it was asked for: a wrong event ends the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from engine.protocol import Internal, MicroserveError
from router.base import Chunk, EngineUnreachable
from router.engines.http_client import HttpClient
from router.engines.lines import Lines
from router.engines.openai.answer import Answer, Asked
from router.engines.openai.errors import error_of
from router.engines.openai.events import CompletionEvent, read_event
from router.engines.openai.probe import COMPLETIONS

__all__ = ["Completion"]

log = logging.getLogger(__name__)

MOST_LINE = 16 << 20  # bytes; the first event may repeat the tokens of the prompt
MOST_UNWANTED = 1 << 20  # bytes of comments and empty lines in a row
SMALL = 64 << 10  # bytes of a refusal
TAIL_S = 1.0  # for the usage, which follows the last event, and for the end of the stream


class Completion:
    """The chunks of one generation. Events that arrive between two `next`s become one chunk."""

    def __init__(self, asked: Asked, answer: Answer, ended: Callable[[], None]) -> None:
        """`ended` is called when its connection is no longer in use."""
        self._asked = asked
        self._answer = answer
        self._ended = ended
        self._lines = Lines(MOST_LINE)
        self._unwanted = 0  # bytes since the last event
        self._chunk: Chunk | None = None
        self._over = False  # no further event is taken
        self._error: MicroserveError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._begun: asyncio.Future[None] = self._loop.create_future()
        self._due = 0.0  # when the next chunk may be passed on (loop time)
        self._timer: asyncio.TimerHandle | None = None
        self._tail: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(
        self, tasks: asyncio.TaskGroup, http: HttpClient, body: bytes, headers: Mapping[str, str]
    ) -> None:
        """Make the call, in a task of `tasks`."""
        self._task = tasks.create_task(self._run(http, body, headers), name="completion")
        # Not in the task: it may be cancelled before it begins.
        self._task.add_done_callback(self._call_ended)

    async def accepted(self) -> None:
        """Wait until the server sends the answer. Raises why it does not; ends the call if so."""
        try:
            await self._begun
        except BaseException:
            self.abort()
            raise
        if (error := self._failure()) is not None:
            raise error

    def progress(self) -> int | None:
        """Return how many events have arrived; None once no more can."""
        return None if self._over else self._answer.events

    async def next(self) -> Chunk:
        """Return the next chunk.

        Raises the server's error, and `EngineUnreachable` if the stream is lost or the server sends
        what it was not asked for; in any case after the chunks that arrived before.
        """
        while True:
            chunk = self._chunk
            if chunk is not None:
                self._chunk = None
                return chunk
            if (error := self._failure()) is not None:
                raise error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def abort(self, reason: str = "the stream was given up") -> None:
        """Make a pending or later `next` raise `EngineUnreachable`; closes the connection."""
        self._chunk = None
        self._end(EngineUnreachable(reason))

    async def finish(self) -> None:
        """The rest of the stream is read by the call itself, which ends soon."""

    def _failure(self) -> MicroserveError | None:
        """Return why nothing comes, if so."""
        return self._error if self._chunk is None else None

    def _release(self) -> None:
        """Pass on what has arrived, unless it shall wait for more; `_timer` ends the wait."""
        now = self._loop.time()
        if self._due:  # not the first chunk
            if self._asked.chunk_tokens > 1:
                if self._answer.waiting < self._asked.chunk_tokens:
                    return
            elif now < self._due:
                if self._timer is None:
                    self._timer = self._loop.call_at(self._due, self._hold_over)
                return
        if (chunk := self._answer.release()) is not None:
            self._due = now + self._asked.interval_s
            self._pass_on(chunk)

    async def _run(self, http: HttpClient, body: bytes, headers: Mapping[str, str]) -> None:
        try:
            reply = await http.call("POST", COMPLETIONS, body, headers, sink=self._feed, most=SMALL)
        except MicroserveError as error:
            self._fail(error)
        except Exception as error:  # concerns this request only; the router must go on
            log.exception("a completion on %s failed", http.url)
            self._fail(Internal(f"the router failed to call the server: {error}"))
        else:
            if reply.status != 200:
                self._fail(error_of(reply.status, reply.body, reply.retry_after))
            self._stream_ended()

    def _call_ended(self, task: asyncio.Task[None]) -> None:
        self._ended()
        self._fail(EngineUnreachable("the call was given up"))
        for timer in (self._timer, self._tail):
            if timer is not None:
                timer.cancel()
        self._task = None

    def _feed(self, data: bytes) -> None:
        if not self._begun.done():
            self._begun.set_result(None)
        if self._over:
            return
        try:
            for line in self._lines.feed(data):
                event = read_event(line) if line else None
                if event == "done":
                    self._stream_ended()
                elif event is not None:
                    self._unwanted = 0
                    self._take(event)
                else:
                    self._unwanted += len(line) + 1
                if self.progress() is None:
                    return
            if self._unwanted > MOST_UNWANTED:
                raise EngineUnreachable(f"the server sent {self._unwanted} bytes without an event")
        except MicroserveError as error:
            self._fail(error)
        except Exception as error:  # a sink must not raise
            log.exception("an event of a completion could not be read")
            self._fail(Internal(f"the router failed to read an event: {error}"))

    def _take(self, event: CompletionEvent) -> None:
        """Pass on what an event adds. Raises `MicroserveError`."""
        self._answer.take(event)
        if self._answer.last is None:
            self._release()
        self._await_usage()

    def _await_usage(self) -> None:
        """End the answer if its usage is there; otherwise soon, if it is at its end."""
        last = self._answer.last
        if last is None:
            return
        if last.usage is not None:
            self._finish()
        elif self._tail is None:
            self._tail = self._loop.call_later(TAIL_S, self._tail_over)

    def _pass_on(self, chunk: Chunk) -> None:
        if self._chunk is None:
            self._chunk = chunk
        else:
            self._chunk.extend(chunk)
        self._wake()

    def _finish(self) -> None:
        """Pass on the end of the answer, if it is there. Idempotent."""
        last = self._answer.last
        if self._over or last is None:
            return
        self._over = True
        self._pass_on(last)
        if self._chunk is not None and last.usage is not None:
            self._chunk.begin = last.usage.cached_tokens
        if self._tail is None:
            self._tail = self._loop.call_later(TAIL_S, self._tail_over)

    def _stream_ended(self) -> None:
        self._finish()
        self._fail(EngineUnreachable("the server closed the stream before its end"))

    def _tail_over(self) -> None:
        """Wait no longer for the usage, nor for the end of the stream."""
        self._finish()
        if self._task is not None:
            self._task.cancel()

    def _fail(self, error: MicroserveError) -> None:
        """Raise `error` from `next`, after the chunks that arrived before; ends the call.

        Does nothing once the answer is complete, or has failed.
        """
        if self._over:
            return
        complete = self._answer.last is not None  # only its usage is missing
        if not complete and (chunk := self._answer.release()) is not None:
            self._pass_on(chunk)
            complete = self._answer.last is not None
        if complete:
            self._finish()
        else:
            self._end(error)

    def _end(self, error: MicroserveError) -> None:
        self._over = True
        self._error = self._error or error
        if not self._begun.done():
            self._begun.set_result(None)
        if self._task is not None:
            self._task.cancel()
        self._wake()

    def _hold_over(self) -> None:
        """Pass on what was held back for the interval between two chunks."""
        self._timer = None
        if not self._over and self._answer.last is None:
            self._release()
            self._await_usage()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
