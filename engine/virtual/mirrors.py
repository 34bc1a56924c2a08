"""The mirrors of a virtual engine: they are opened, and get more room, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from engine.execution.generation_mirror import GenerationMirror
from engine.protocol import Extend, LeaseExpired, MicroserveError, Mirror
from engine.scheduling import Generation
from engine.virtual.cache import VirtualCache
from kvcache.types import LeaseId

__all__ = ["ExtendLease", "VirtualMirrors"]

# Requests more room in a lease from the engine at a URL; returns the lease's new address.
ExtendLease = Callable[[str, Extend], Awaitable[str]]


class VirtualMirror(GenerationMirror):
    """The mirror of a virtual generation, which never blocks."""

    def __init__(
        self,
        cache: VirtualCache,
        lease_id: LeaseId,
        every: int,
        most: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(cache, lease_id, every, most, loop)
        self._paused = cache.pause_mirror

    async def go_on(self, kv_addr: str) -> None:
        """Wait until nothing is in flight, then continue with more room."""
        if self._mirror is None:
            raise LeaseExpired("the mirror is not open")
        paused = asyncio.wrap_future(self._paused(self._mirror, kv_addr))
        await asyncio.wait((paused,))
        paused.exception()  # a put that failed is known to the mirror, which `extend` asks
        self.extend(kv_addr)


class VirtualMirrors:
    """One task per mirror, as `engine.service.mirror_tasks` has."""

    def __init__(self, cache: VirtualCache, extend: ExtendLease) -> None:
        self._cache = cache
        self._extend = extend
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, generation: Generation, call: Mirror) -> VirtualMirror:
        """Start to mirror a generation; the caller has the stepper advance it.

        Raises `BadAddress`.
        """
        address = self._cache.check_address(call.kv_addr, generation.tokens)
        most = generation.prompt_len + generation.sampling.max_tokens
        loop = asyncio.get_running_loop()
        mirror = VirtualMirror(self._cache, address.lease_id, call.every, most, loop)
        task = loop.create_task(
            self._run(mirror, address.url, call.kv_addr, list(generation.tokens))
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return mirror

    def close(self) -> None:
        """End all mirrors."""
        for task in self._tasks:
            task.cancel()

    async def _run(self, mirror: VirtualMirror, url: str, kv_addr: str, tokens: list[int]) -> None:
        try:
            mirror.open(kv_addr, tokens)
            while reserve := await mirror.wait_for_extension():
                kv_addr = await self._extend(url, Extend(kv_addr=kv_addr, reserve=reserve))
                await mirror.go_on(kv_addr)
        except MicroserveError as error:
            mirror.stop(error)
        finally:
            mirror.end()
