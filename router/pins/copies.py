"""The calls to engines that make, check and end one copy of a pinned prefix."""

from __future__ import annotations

import logging
import uuid
from typing import Literal

from engine.protocol import MicroserveError, NoCapacity
from router.base import EngineRequestId, Request
from router.engines import Backend
from router.execution import copy_prefix, own_attempt
from router.legs import Attempt, Runtime
from router.strategy import Engine

__all__ = ["How", "make_copy", "pinned_at", "unpin_at"]

log = logging.getLogger(__name__)
How = Literal["cached", "copied", "computed"]
HEADERS: dict[str, str] = {}  # no client's


async def make_copy(
    runtime: Runtime, request: Request, target: Backend, source: tuple[Backend, int] | None
) -> How:
    """Bring the request's prompt, full pages, into the cache of `target` and pin it there.

    What is missing there is put by `source`, an engine and how many tokens it has, and what it
    cannot give is computed. Leaving by any exit ends what has been begun, but not a pin. Raises
    `NoCapacity`, also if the prefix was evicted before it was pinned, and the engines' errors.
    """
    size = len(request.tokens)
    if await pinned_at(runtime, request, target) == size:
        return "cached"
    if source is not None:
        sender, end = source
        try:
            async with _attempt(runtime, [sender, target]) as attempt:
                await copy_prefix(request, end, Engine(attempt, sender), Engine(attempt, target))
        except NoCapacity:
            raise
        except MicroserveError as error:
            log.info("no copy from engine %s to %s: %s", sender.id, target.id, error)
        else:
            if await pinned_at(runtime, request, target) == size:
                return "copied"
    async with _attempt(runtime, [target]) as attempt:
        async for _ in Engine(attempt, target).start_generate(request):
            pass
    if await pinned_at(runtime, request, target) < size:
        raise NoCapacity(f"the prefix was evicted from engine {target.id} before it was pinned")
    return "computed"


async def pinned_at(runtime: Runtime, request: Request, backend: Backend) -> int:
    """Pin what the engine has cached of the prompt; return how many tokens these are.

    Raises `NoCapacity` if it may not pin so many pages, and the engine's errors.
    """
    async with _attempt(runtime, [backend]) as attempt:
        call = backend.client.pin
        return await attempt.call(backend, call, {"prompt": request.tokens}, named=False)


async def unpin_at(runtime: Runtime, tokens: list[int], backend: Backend) -> None:
    """End the pin of `tokens` there. Raises the engine's errors."""
    async with _attempt(runtime, [backend]) as attempt:
        call = backend.client.unpin
        await attempt.call(backend, call, {"prompt": tokens}, named=False)


def _attempt(runtime: Runtime, backends: list[Backend]) -> Attempt:
    return own_attempt(runtime, HEADERS, EngineRequestId(f"pin-{uuid.uuid4().hex}"), backends)
