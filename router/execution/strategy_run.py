"""One run of a strategy for one choice: whatever it does, it ends and leaves nothing behind."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from engine.protocol import MOST_MESSAGE, MOST_NAME, DuplicateRequest, MicroserveError
from router.base import (
    Chunk,
    Request,
    StrategyBlocked,
    StrategyError,
    StrategyStalled,
    fired_late,
    root_cause,
)
from router.execution.choice_writer import ChoiceWriter
from router.legs import Attempt
from router.rollout import Revision
from router.strategy import Cluster
from router.supervision import ChildTasks, Interrupted, Supervised, ViolationKind, line_in, waits_at
from router.telemetry import CANCELLED

__all__ = ["StrategyRun"]


class StrategyRun:
    """Runs the strategy of `revision` once, supervised, in a task of its own.

    With its own task, a cancelled request cannot be confused with the strategy's own timeouts and
    task groups. A failure of the strategy's own is raised as `StrategyError`, which names strategy,
    generation and line, and is counted as a violation. Errors of engines pass through.
    """

    def __init__(
        self, revision: Revision, attempt: Attempt, request: Request, writer: ChoiceWriter
    ) -> None:
        config = attempt.runtime.config
        self._revision = revision
        self._attempt = attempt
        self._writer = writer
        self._grace = config.grace_s
        self._stall = config.stall_s
        held: dict[str, Any] = {
            "grace": self._grace, "on_ignored": self._ignored, "holder": revision,
        }  # fmt: skip
        self._child_tasks = ChildTasks(**held)
        self._supervised = Supervised(self._run(), **held)
        self._chunks = revision.bound.run(request, Cluster(attempt, revision.states))
        self._seen: tuple[int, int] | None = None  # legs and tokens at the last check

    async def finish(self) -> None:
        """Run it to its end, and end the tasks that it has started.

        Cancellation ends it within `grace_s`, even if the strategy ignores it. So does a lack of
        progress for `stall_s`.
        """
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._stall, self._check_progress)
        try:
            await self._end_of(self._supervised.start(loop, context=self._child_tasks.context()))
        except Interrupted as error:
            raise self._blocked(error) from None
        finally:
            self._timer.cancel()
            left = await self._child_tasks.end() if self._child_tasks else 0
            if left and not self._supervised.ending:
                self._violation("left_tasks", f"leaves {left} task{'s' * (left > 1)} behind")
            # Break the reference cycles.
            del self._supervised, self._child_tasks

    async def _end_of(self, task: asyncio.Task[None]) -> None:
        """Wait for `task`, and raise what it raises. Cancellation ends the task first."""
        cancelled: asyncio.CancelledError | None = None
        try:
            while not task.done():
                # `await task` would pass the cancellation on directly, without a time limit.
                ended = task.get_loop().create_future()
                task.add_done_callback(partial(_wake, ended))
                try:
                    await ended
                except asyncio.CancelledError as error:
                    cancelled = error
                    self._end()
            if cancelled is not None:
                if not task.cancelled():
                    task.exception()  # mark it as retrieved: the cancellation takes precedence
                raise cancelled
            task.result()
        finally:
            del task, cancelled  # break the reference cycle with the errors' tracebacks

    async def _run(self) -> None:
        chunks, writer, supervised = self._chunks, self._writer, self._supervised
        finished = False
        try:
            while True:
                try:
                    chunk = await anext(chunks)
                except StopAsyncIteration:
                    break
                except BaseException as error:
                    if finished and _is_engines(error):
                        break  # the client has the whole answer; the receipt shows the error
                    self._raise_own(error)
                    raise
                if finished:
                    raise self._violation("went_on", "goes on after the stream's end")
                if not isinstance(chunk, Chunk):
                    raise self._violation("no_chunk", f"yielded no chunk but {chunk!r:.80}")
                if supervised.ending:
                    self._violation("ignored_cancellation", "yields after its cancellation")
                    raise asyncio.CancelledError
                finished = chunk.finish_reason is not None
                if (reading := writer.write(chunk)) is not None:
                    await reading
            if chunks.left_open:
                await self._close()
        except GeneratorExit:  # the run was abandoned: nothing can be awaited
            raise
        except BaseException:
            await self._close()
            raise
        if supervised.ending:
            self._violation("ignored_cancellation", "swallowed its cancellation")
        elif not finished:
            raise self._violation("ended_early", "ended before the stream did")

    def _raise_own(self, error: BaseException) -> None:
        """Raise a strategy's own error as `StrategyError`; return for errors that pass unchanged.

        Raising here keeps the error, and all that it refers to, out of the caller's frame.
        """
        cause = root_cause(error)
        if isinstance(cause, Interrupted):
            raise self._blocked(cause) from None
        if isinstance(cause, DuplicateRequest) and (what := _overlap(self._attempt)):
            raise self._violation("overlap", what, line_in(error.__traceback__)) from error
        closed = isinstance(cause, GeneratorExit) and not self._supervised.running
        if isinstance(cause, MicroserveError) or closed:
            if isinstance(cause, MicroserveError):
                _bound(cause)
            if cause is not error:
                raise cause from error
            return
        if isinstance(error, asyncio.CancelledError):
            if self._supervised.ending:
                return
            # The run was not cancelled: the strategy awaited something that was.
            raise self._violation("raised", "CancelledError") from error
        what = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
        raise self._violation("raised", what, line_in(error.__traceback__)) from error

    async def _close(self) -> None:
        """Make the strategy leave its `async with`s. Errors on the way only count as violations."""
        loop = asyncio.get_running_loop()
        error = StrategyError(f"{self._revision.label} does not end")
        timer = loop.call_later(self._grace, self._end, error)
        try:
            await self._chunks.aclose()
        except asyncio.CancelledError:
            if self._supervised.ending:
                raise
            self._violation("cleanup", "CancelledError in its cleanup")
        except Exception as wrong:  # noqa: BLE001  any error of the user's code
            what = f"{type(wrong).__name__}: {wrong}"
            if isinstance(wrong, RuntimeError) and "GeneratorExit" in str(wrong):
                what = "yields"
            self._violation("cleanup", f"{what} in its cleanup", line_in(wrong.__traceback__))
        finally:
            timer.cancel()

    def _check_progress(self) -> None:
        """End the run if it made no progress since the last check while no engine worked for it.

        Waiting for a client that does not read does not count.
        """
        legs = self._attempt.receipt.legs
        seen = (len(legs), len(self._writer.tokens))
        working = any(leg.ms is None and leg.request_id == self._attempt.request_id for leg in legs)
        waiting = self._chunks.running
        late = fired_late(self._timer)  # nobody could make progress
        if waiting and not working and not late and seen == self._seen:
            message = f"made no progress for {self._stall:g} s"
            self._violation("stalled", message, waits_at(self._chunks.innermost))
            self._end(StrategyStalled(f"{self._revision.label} {message}"))
            return
        self._seen = seen
        self._timer = asyncio.get_running_loop().call_later(self._stall, self._check_progress)

    def _end(self, error: Exception | None = None) -> None:
        """End the run and its child tasks together, since either may wait for the other."""
        self._supervised.end(error)
        self._child_tasks.begin_end()

    def _ignored(self) -> None:
        self._violation(
            "ignored_cancellation", "does not end when cancelled", waits_at(self._chunks.innermost)
        )

    def _blocked(self, interrupted: BaseException) -> StrategyBlocked:
        line = line_in(interrupted.__traceback__)
        message = f"{self._revision.label} held up the event loop"
        return StrategyBlocked(f"{message} ({line})" if line else message)

    def _violation(self, kind: ViolationKind, what: str, line: str = "") -> StrategyError:
        """Count a violation; return the error that reports it."""
        label, where = self._revision.label, f" ({line})" if line else ""
        most = MOST_MESSAGE - len(f"{label}: {where}")
        message = f"{_bounded(what, most)}{where}"
        self._revision.add_violation(kind, message)
        return StrategyError(f"{label}: {message}")


def _bound(error: MicroserveError) -> None:
    """Shorten what an error says: the strategy may have raised it."""
    error.message = _bounded(error.message, MOST_MESSAGE)
    if error.param is not None:
        error.param = _bounded(error.param, MOST_NAME)
    if error.code is not None:
        error.code = _bounded(error.code, MOST_NAME)


def _bounded(what: object, most: int) -> str:
    """Return at most `most` characters, as receipts, events, logs and answers can have them.

    Half of a surrogate pair, which no JSON can have, is written as its escape.
    """
    text = str(what).encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= most else f"{text[: max(most - 1, 0)]}…"


def _wake(waiter: asyncio.Future[None], _: asyncio.Task[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _overlap(attempt: Attempt) -> str:
    """Return how a call that an engine has refused as a duplicate collides with an earlier one.

    Engines know all calls of an attempt by one id. Empty if the attempt has made no other call that
    explains the refusal: then the engine is wrong.
    """
    legs = [leg for leg in attempt.receipt.legs if leg.request_id == attempt.request_id]
    while legs and (legs[-1].error is None or legs[-1].error["type"] != DuplicateRequest.type):
        legs.pop()
    if not legs:
        return ""
    refused = legs.pop()
    what = f"calls {refused.call} on engine {refused.engine}"
    for leg in reversed([leg for leg in legs if leg.engine == refused.engine]):
        if leg.ms is None:
            return f"{what} while its earlier {leg.call} there has not ended"
        if leg.error is not None and leg.error["type"] == CANCELLED:
            return f"{what} after it has ended its earlier {leg.call} there early"
        if leg.call == refused.call == "prep_recv":
            return f"{what} while its earlier lease there is open"
    return ""


def _is_engines(error: BaseException) -> bool:
    cause = root_cause(error)
    return isinstance(cause, MicroserveError) and not isinstance(cause, StrategyError)
