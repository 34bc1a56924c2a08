"""Sends from vLLM: `remote_send` from the claim of the lease to the reply."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input

from engine.protocol import (
    BadRequest,
    DuplicateRequest,
    Internal,
    Limits,
    MicroserveError,
    NoCapacity,
    RemoteSend,
    RemoteSendReply,
    error_from_body,
    send_range,
)
from engine.service import EngineMetrics
from engine.vllm.core_client import CoreClient
from engine.vllm.sampling import send_params

__all__ = ["Sends"]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Waiting:
    claimed: asyncio.Future[None]
    over: asyncio.Future[dict[str, Any]]  # the note of its end


class Sends:
    """The running sends. Lives on one event loop."""

    def __init__(
        self,
        llm: Any,
        core: CoreClient,
        limits: Limits,
        metrics: EngineMetrics,
        tasks: asyncio.TaskGroup,
        changed: Callable[[], None],
        *,
        most: int,
    ) -> None:
        """Admit at most `most` at a time; `tasks` are the parents of what ends sends, and
        `changed` is called when one has ended."""
        self._llm = llm
        self._core = core
        self._limits = limits
        self._metrics = metrics
        self._tasks = tasks
        self._changed = changed
        self._most = most
        self._live: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._live))

    async def run(self, call: RemoteSend) -> RemoteSendReply:
        """Implement `ServedEngine.remote_send` for a checked prompt."""
        begin, end = send_range(call)
        self._limits.check_send(end)
        if call.request_id in self._live:
            raise DuplicateRequest(f"a send of {call.request_id} is running", param="request_id")
        if len(self._live) >= self._most:
            raise NoCapacity(f"{len(self._live)} sends are running")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(loop.create_future(), loop.create_future())
        self._live[call.request_id] = waiting
        began = time.monotonic()
        try:
            over = await self._send(call, begin, end, waiting)
        finally:
            # Whatever has become of the call: an open_send under way comes before it. A send that
            # has succeeded does not wait for it, because it waits for vLLM's step.
            self._tasks.create_task(self._end(call.request_id, waiting))
        cached = int(over.get("cached") or 0)
        reply = RemoteSendReply(
            sent_tokens=end - begin,
            cached_tokens=max(min(cached, end) - begin, 0),
            computed_tokens=end - min(cached, end),
            bytes=int(over.get("bytes", 0)),
            ms=(time.monotonic() - began) * 1e3,
            put_ms=float(over.get("put_ms", 0.0)),
        )
        self._metrics.sent(reply)
        return reply

    def abort(self, request_id: str) -> None:
        """Abort a send, if there is one; its call fails."""
        waiting = self._live.get(request_id)
        if waiting is not None and not waiting.over.done():
            waiting.over.set_exception(Internal("the send was aborted"))

    def on_note(self, note: dict[str, Any]) -> None:
        """Take in a note about a send."""
        waiting = self._live.get(note["send"])
        if waiting is None:
            return
        if "error" in note and not waiting.over.done():
            waiting.over.set_exception(error_from_body(note))
        elif note.get("over") and not waiting.over.done():
            waiting.over.set_result(note)
        elif note.get("claimed") and not waiting.claimed.done():
            waiting.claimed.set_result(None)

    async def _end(self, request_id: str, waiting: _Waiting) -> None:
        try:
            await self._core.call("end_send", request_id=request_id)
        except MicroserveError as error:
            log.warning("the send %s did not end: %s", request_id, error.message)
        finally:
            del self._live[request_id]
            for future in (waiting.claimed, waiting.over):
                future.add_done_callback(_heed)
                future.cancel()
            self._changed()

    async def _send(
        self, call: RemoteSend, begin: int, end: int, waiting: _Waiting
    ) -> dict[str, Any]:
        """Return the note of the send's end, once everything has landed."""
        opened = await self._core.call(
            "open_send",
            request_id=call.request_id,
            prompt=call.prompt,
            begin=begin,
            end=end,
            kv_addr=call.kv_addr,
        )
        if opened["whole"]:
            return await waiting.over
        await asyncio.wait((waiting.claimed, waiting.over), return_when=asyncio.FIRST_COMPLETED)
        if waiting.over.done():
            waiting.over.result()  # raises
        computing = asyncio.ensure_future(self._compute(call, end))
        try:
            await asyncio.wait((computing, waiting.over), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.over.done():
                await computing  # raises, or only the last bytes are under way
            return await waiting.over
        finally:
            computing.cancel()  # what has landed, or has failed, needs no more of vLLM's work
            await asyncio.wait((computing,))

    async def _compute(self, call: RemoteSend, end: int) -> None:
        """Have vLLM compute the KV of `prompt[:end]`."""
        outputs = self._llm.generate(
            tokens_input(call.prompt[:end]),
            send_params(call.request_id),
            f"send-{call.request_id}",
            priority=call.priority,
        )
        try:
            async for _ in outputs:
                pass
        except (VLLMClientError, ValueError) as error:
            raise BadRequest(f"vLLM refuses the prompt: {error}") from error


def _heed(future: asyncio.Future[Any]) -> None:
    """Take note of a future's failure, which its call may not have waited for."""
    if not future.cancelled():
        future.exception()
