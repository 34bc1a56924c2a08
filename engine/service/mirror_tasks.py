"""The mirrors of one engine: the tasks that open them and request more room from peers."""

from __future__ import annotations

import asyncio
import logging
import ssl

import httpx
import orjson

from engine.execution.generation_mirror import GenerationMirror
from engine.protocol import (
    Extend,
    ExtendReply,
    Internal,
    MicroserveError,
    Mirror,
    PeerUnreachable,
    error_from_body,
)
from engine.scheduling import Generation
from engine.service.metrics import EngineMetrics
from engine.web import call_peer
from kvcache.cache import KVCache

__all__ = ["MirrorTasks"]

log = logging.getLogger(__name__)

EXTEND_TIMEOUT_S = 5.0  # for a whole reply
MOST_REPLY = 16 << 20  # bytes; a reply has the address of a lease, which names all of its pages
MESSAGE = 500  # characters of an error about a reply


class MirrorTasks:
    """Runs one task per mirror; `close` ends them all. Lives on one asyncio event loop.

    An error of a mirror stops that mirror and nothing else.
    """

    def __init__(
        self,
        cache: KVCache,
        metrics: EngineMetrics,
        api_key: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`api_key` is common to this engine and its peers; empty if they need none.

        `tls` verifies peers with https URLs; None if there are none.
        """
        self._cache = cache
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], GenerationMirror] = {}
        self._sent = 0  # tokens sent by ended mirrors
        # An empty context: loading the system trust store would take longer than a call.
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=EXTEND_TIMEOUT_S,
            verify=tls or ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    @property
    def running(self) -> int:
        """The number of mirrors that have not ended."""
        return sum(not mirror.over for mirror in self._tasks.values())

    @property
    def sent(self) -> int:
        """Tokens mirrored since the start."""
        return self._sent + sum(mirror.sent for mirror in self._tasks.values())

    def start(self, generation: Generation, call: Mirror) -> GenerationMirror:
        """Start to mirror a generation; the caller has the step loop advance it.

        Raises `BadAddress`.
        """
        address = self._cache.check_address(call.kv_addr, generation.tokens)
        most = generation.prompt_len + generation.sampling.max_tokens
        mirror = GenerationMirror(self._cache, address.lease_id, call.every, most, self._loop)
        task = self._loop.create_task(
            self._run(mirror, address.url, call.kv_addr, list(generation.tokens))
        )
        self._tasks[task] = mirror
        task.add_done_callback(self._forget)
        return mirror

    async def close(self) -> None:
        """End all mirrors and wait for their tasks."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    async def _run(
        self, mirror: GenerationMirror, url: str, kv_addr: str, tokens: list[int]
    ) -> None:
        try:
            # Claiming the lease may wait for the peer's write right, so it runs on a thread.
            await asyncio.to_thread(mirror.open, kv_addr, tokens)
            while reserve := await mirror.wait_for_extension():
                kv_addr = await self._request_extension(url, kv_addr, reserve)
                await asyncio.to_thread(mirror.extend, kv_addr)
        except MicroserveError as error:
            mirror.stop(error)
        except Exception as error:
            log.exception("a mirror failed")
            mirror.stop(Internal(f"the mirror failed: {error}"))
        finally:
            mirror.end()

    async def _request_extension(self, url: str, kv_addr: str, reserve: int) -> str:
        """Request room for `reserve` more tokens; return the new address.

        Raises the peer's error, or `PeerUnreachable`.
        """
        if not url:
            raise PeerUnreachable("the lease's owner has no URL to request more room from")
        call = Extend(kv_addr=kv_addr, reserve=reserve)
        try:
            reply = await call_peer(
                self._http,
                "POST",
                f"{url}/microserving/extend",
                call.model_dump_json().encode(),
                most=MOST_REPLY,
                within_s=EXTEND_TIMEOUT_S,
            )
            if reply.status >= 400:
                raise error_from_body(orjson.loads(reply.body))
            return ExtendReply.model_validate_json(reply.body).kv_addr
        except (PeerUnreachable, ValueError) as error:
            raise PeerUnreachable(f"requesting more room from {url}: {error}"[:MESSAGE]) from error

    def _forget(self, task: asyncio.Task[None]) -> None:
        mirror = self._tasks.pop(task)
        self._sent += mirror.sent
        if mirror.stopped is not None:
            self._metrics.mirror_stopped(mirror.stopped.type)
