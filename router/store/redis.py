"""A store in Redis or Valkey."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar, cast

from engine.protocol import BadRequest
from router.base import StoreUnavailable, StoreUnreadable
from router.store import scripts
from router.store.address import StoreAddress, read_password
from router.store.notices import Notices
from router.store.store import (
    MOST_SOURCE,
    RESTORE_S,
    Change,
    Document,
    LogEntry,
    Outcome,
    Take,
    Taken,
)

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.commands.core import AsyncScript

__all__ = ["RedisStore"]

log = logging.getLogger(__name__)

TIMEOUT_S = 1.0  # of connecting, and of each reply
CALL_S = 2.5  # of a call with its waiting for a connection and one retry
CONNECTIONS = 4  # for limits of keys, and as many for all else
RETRY_S = 0.25  # between two tries to receive notices
CLOSE_S = 1.0  # for all connections to close
T = TypeVar("T")


class RedisStore:
    """Implements `SharedStore`. Requests that wait for limits of keys hold up no other call.

    Keys begin with `{NAME}:`, where NAME is what follows `#` in the URL, or `microserve`. So
    several fleets may use one server. Whoever can write to the server can run code in the routers.
    """

    def __init__(self, url: str, *, password_file: str = "") -> None:
        """Connects with the first call. The password file is read at each connection.

        Raises `BadRequest` for a URL of another kind, an unusable password file, or if the package
        `redis` is not installed.
        """
        address = StoreAddress.parse(url, password_file=password_file)
        try:
            import redis.asyncio as redis
            from redis.asyncio.retry import Retry
            from redis.backoff import ConstantBackoff
            from redis.credentials import CredentialProvider
            from redis.exceptions import RedisError, ResponseError
        except ImportError:
            raise BadRequest("--store needs the extra: pip install 'microserve[redis]'") from None
        self._errors: tuple[type[Exception], ...] = (RedisError, OSError)
        self._refusals: type[Exception] = ResponseError
        self._prefix = f"{{{address.name}}}"
        self._channel = f"{self._prefix}:changes"
        self._notices = Notices()
        self._last_error = ""
        self.available = False
        credentials = {}
        if password_file:

            class Credentials(CredentialProvider):
                def get_credentials(self) -> tuple[str] | tuple[str, str]:
                    try:
                        password = read_password(password_file)
                    except BadRequest as error:
                        raise OSError(error.message) from None
                    return (address.username, password) if address.username else (password,)

            credentials["credential_provider"] = Credentials()
        try:
            self._pools = [
                redis.BlockingConnectionPool.from_url(
                    address.url,
                    **credentials,
                    max_connections=CONNECTIONS,
                    timeout=CALL_S,
                    socket_timeout=TIMEOUT_S,
                    socket_connect_timeout=TIMEOUT_S,
                    retry=Retry(ConstantBackoff(0.05), 1),
                )
                for _ in range(2)
            ]
        except (ValueError, *self._errors):
            raise BadRequest("--store: the package redis does not understand this URL") from None
        self._redis: Redis = redis.Redis(connection_pool=self._pools[0])
        self._limits: Redis = redis.Redis(connection_pool=self._pools[1])
        self._scripts: dict[str, AsyncScript] = {}

    async def run(self) -> None:
        """Subscribe to the notices, again whenever the connection is lost."""
        while True:
            try:
                await _unswallowed(self._receive())
            except self._errors as error:  # RedisError's subclasses and OSError
                self._lost(error)
            except Exception:
                log.exception("the notices of the store cannot be read")
            await asyncio.sleep(RETRY_S)

    async def _receive(self) -> None:
        async with self._redis.pubsub() as subscription:
            await _unswallowed(subscription.subscribe(self._channel))
            while True:
                # The confirmation of a subscription counts too: the client subscribes anew after a
                # broken connection, and what came meanwhile is not received.
                if await _unswallowed(subscription.get_message(timeout=10.0)):
                    self._notices.notify()

    async def wait(self, seen: int, timeout_s: float) -> int:
        return await self._notices.wait(seen, timeout_s)

    async def get(self) -> Document:
        version, value = await self._script(scripts.GET, ["document"])
        return self._read("document", lambda: Document(int(version), value))

    async def commit(self, change: Change) -> Outcome:
        """As `SharedStore`. If the connection breaks, the document tells whether it was done."""
        keys = ["document", "sources", "log", "log_numbers", "settling"]
        new = change.document
        arguments = [
            change.expected, new.version, new.value, int(change.restoring), round(RESTORE_S * 1e3),
            self._channel, len(change.sources), len(change.entries),
            *(part for pair in change.sources.items() for part in pair),
            *change.entries, *change.dropped,
        ]  # fmt: skip
        try:
            outcome = await self._script(scripts.COMMIT, keys, *arguments)
        except StoreUnavailable:
            if await self.get() != new:  # raises too if the store is still lost
                raise
            return "done"
        if outcome == b"stale" and await self.get() == new:
            return "done"  # the client sent it a second time
        return cast("Outcome", outcome.decode())

    async def source(self, digest: str) -> bytes | None:
        size = await self._call(self._redis.hstrlen(self._key("sources"), digest))
        if size > MOST_SOURCE:
            return None
        found = await self._call(self._redis.hget(self._key("sources"), digest))
        return cast("bytes | None", found)

    async def append(self, entry: bytes) -> None:
        await self._script(scripts.APPEND, ["log", "log_numbers"], entry)

    async def log(self) -> list[LogEntry]:
        lines = await self._call(self._redis.lrange(self._key("log"), 0, -1))
        parts = (line.partition(b" ") for line in lines)
        return [LogEntry(int(number), value) for number, _, value in parts if number.isdigit()]

    async def report(self, counter: str, member: str, values: list[int]) -> list[int]:
        told = " ".join(map(str, values))
        parts = await self._script(scripts.REPORT, [f"counter:{counter}"], member, told)
        return self._read(
            f"counter:{counter}",
            lambda: [sum(p) for p in zip(*(map(int, one.split()) for one in parts), strict=True)],
        )

    async def take(self, takes: list[Take]) -> Taken:
        keys = [f"bucket:{take.bucket}:{take.limit}" for take in takes]
        arguments = [part for take in takes for part in (take.limit, take.needed, take.amount)]
        admitted, *levels = await self._script(scripts.TAKE, keys, *arguments, client=self._limits)
        return Taken(bool(admitted), [float(level) for level in levels])

    async def announce(self, kind: str, id: str, value: bytes, ttl_s: float) -> None:
        keys = [f"members:{kind}", f"ends:{kind}"]
        await self._script(scripts.ANNOUNCE, keys, id, value, round(ttl_s * 1e3), self._channel)

    async def withdraw(self, kind: str, id: str) -> None:
        keys = [f"members:{kind}", f"ends:{kind}"]
        await self._script(scripts.WITHDRAW, keys, id, self._channel)

    async def members(self, kind: str) -> dict[str, bytes]:
        found = await self._script(scripts.MEMBERS, [f"members:{kind}", f"ends:{kind}"])
        pairs = zip(found[::2], found[1::2], strict=True)
        return {id.decode("utf-8", "replace"): value for id, value in pairs}

    async def close(self) -> None:
        """Close all connections, within `CLOSE_S` even if the server is stopped."""
        with suppress(*self._errors):  # TimeoutError is an OSError
            async with asyncio.timeout(CLOSE_S):
                await asyncio.gather(*(pool.aclose() for pool in self._pools))

    def _read(self, name: str, parse: Callable[[], T]) -> T:
        """Return what is parsed of a key. Raises `StoreUnreadable` if something else is there."""
        try:
            return parse()
        except (ValueError, TypeError):
            key = self._key(name)
            raise StoreUnreadable(f"the store has something else under the key {key}") from None

    def _key(self, name: str) -> str:
        return f"{self._prefix}:{name}"

    async def _script(
        self, script: str, keys: list[str], *arguments: Any, client: Redis | None = None
    ) -> Any:
        names = [self._key(key) for key in keys]
        if (known := self._scripts.get(script)) is None:
            known = self._scripts[script] = self._redis.register_script(script)
        return await self._call(known(keys=names, args=arguments, client=client))

    async def _call(self, call: Awaitable[Any] | Any) -> Any:
        """Return the reply. Raises `StoreUnavailable` for an error, or after `CALL_S` seconds."""
        try:
            async with asyncio.timeout(CALL_S):
                reply = await _unswallowed(call)
        except self._errors as error:  # TimeoutError is an OSError
            self._lost(error)
            refused = isinstance(error, self._refusals)
            what = "the store refuses a call" if refused else "the store does not answer"
            raise StoreUnavailable(f"{what}: {self._last_error}") from None
        self.available = True
        return reply

    def _lost(self, error: BaseException) -> None:
        self._last_error = " ".join(str(error).split())[:200] or type(error).__name__
        self.available = False


async def _unswallowed(call: Awaitable[T]) -> T:
    """Await a call of the client. Raises `CancelledError` even if the client swallows it.

    In Python 3.11 `asyncio.wait_for`, by which the client writes, swallows a cancellation that
    arrives when the write has just ended.
    """
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
