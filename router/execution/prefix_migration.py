"""Context migration (§3.2, Example 4): copies a cached prefix from one engine to another."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.protocol import BadRequest, RemoteSendReply, Sampling
from router.base import EngineRequestId, EngineUnreachable, Request, RevisionNumber
from router.engines import Backend, guard
from router.legs import Attempt, Replicas, Runtime
from router.strategy import Engine
from router.telemetry import Receipt

__all__ = ["Migrated", "copy_prefix", "migrate_prefix", "own_attempt"]


@dataclass(frozen=True, slots=True)
class Migrated:
    """`tokens` of the prefix are now cached at the receiver.

    `sent_tokens` of them, `bytes` in size, were not cached there before. `pinned` of them are
    protected from eviction.
    """

    tokens: int
    sent_tokens: int
    bytes: int
    ms: float
    pinned: int


async def migrate_prefix(
    runtime: Runtime,
    headers: Mapping[str, str],
    prefix: Sequence[int],
    source: Backend,
    target: Backend,
    *,
    pin: bool,
) -> Migrated:
    """Copy the full pages of `prefix` that `source` has cached to `target`'s cache.

    It calls `prep_recv`, `remote_send` and `commit`. With `pin`, the pin moves too: `target`
    protects the prefix from eviction and `source` no longer does. Leaving by any exit ends the
    lease and the send. Raises `BadRequest` if nothing is cached, `EngineUnreachable` if an engine
    is not up or is lost, and the engines' errors, such as `NoCapacity`.
    """
    began, prefixes = time.monotonic(), runtime.registry.prefixes
    for backend in (source, target):
        if backend.status != "up":
            raise EngineUnreachable(f"engine {backend.id} is {backend.status}")
    if barrier := source.barrier_to(target):
        raise BadRequest(f"engines {source.id} and {target.id} {barrier}", param="to")
    source.require("prefixes", "remote_send", *(("pin",) if pin else ()))
    target.require("prep_recv", "commit", *(("pin",) if pin else ()))
    whole = Request(uuid.uuid4().hex, list(prefix), Sampling())
    await guard(prefixes.known(source), source)
    end = prefixes.cached(source, whole, len(prefix), coming=False)
    if not end:
        raise BadRequest(f"engine {source.id} has no full page of it cached", param="prefix")
    name = EngineRequestId(f"migration-{whole.id}")
    async with own_attempt(runtime, headers, name, [source, target]) as attempt:
        sender, receiver = Engine(attempt, source), Engine(attempt, target)
        sent = await copy_prefix(whole, end, sender, receiver)
        pinned = 0
        if pin:
            pinned = await receiver.pin(whole)
            await sender.unpin(whole)
    ms = (time.monotonic() - began) * 1e3
    return Migrated(end, sent.sent_tokens, sent.bytes, ms, pinned)


async def copy_prefix(
    request: Request, end: int, sender: Engine, receiver: Engine
) -> RemoteSendReply:
    """Put the KV of `tokens[:end]` into the receiver's cache; the sender computes what it lacks.

    Raises `BadRequest` if the two do not exchange KV, and the engines' errors.
    """
    async with receiver.prep_recv(request, end=end) as kv:
        sent = await sender.remote_send(request, kv, begin=kv.match_len, end=end)
        if kv.collapsed:
            raise BadRequest(
                f"engine {sender.id} refuses the addresses of {receiver.id}: do they have the "
                "same MICROSERVE_SECRET?",
                param="to",
            )
        await receiver.commit(kv)
    return sent


def own_attempt(
    runtime: Runtime, headers: Mapping[str, str], name: EngineRequestId, backends: list[Backend]
) -> Attempt:
    """Return an attempt for calls of the router's own. Engines know them by `name`."""
    receipt = Receipt(
        id=name, generation=RevisionNumber(0), strategy="", params={}, seed=0, prompt_tokens=0
    )
    return Attempt(
        runtime,
        receipt,
        request_id=name,
        headers=headers,
        choice=0,
        number=1,
        backends=backends,
        replicas=Replicas(runtime.releaser, headers),
    )
