"""The calls that the lead makes into the engine core, on its thread between two steps."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

from engine.protocol import error_body
from engine.vllm.core.state import Core, core
from kvcache.errors import Internal, LeaseExpired, MicroserveError, UnknownLease, Unsupported
from kvcache.types import LeaseId, SeqId

__all__ = ["MicroserveWorker"]

log = logging.getLogger(__name__)

_numbers = count(1)


class MicroserveWorker:
    """What vLLM's worker gets in addition: one method, for `collective_rpc`."""

    def microserve_call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a call of `CALLS`; return its reply, or an error body."""
        try:
            here = core()
            reply = CALLS[name](here, **body)
            here.report()
        except MicroserveError as error:
            retry = getattr(error, "retry_after_s", None)
            return {**error_body(error), "retry_after_s": retry}
        except Exception as error:  # raised, it would end the engine's process
            log.exception("the call %s failed", name)
            return error_body(Internal(f"{name} failed: {type(error).__name__}: {error}"))
        return reply


def hello(here: Core) -> dict[str, Any]:
    """Describe the blocks."""
    layout = here.layout
    return {
        "fingerprint": here.identity.fingerprint,
        "secret_digest": here.identity.secret_digest,
        "page_size": layout.page_size,
        "layers": layout.layers,
        "token_bytes": layout.page_bytes // layout.page_size,
        "total": here.pages.total,
    }


def prep_recv(
    here: Core, request_id: str, prompt: list[int], end: int, reserve: int, lease_s: float
) -> dict[str, Any]:
    """Match `prompt[:end]`, take blocks for the rest, and return where to put it."""
    if reserve:
        raise Unsupported("a vLLM engine makes no room beyond the prompt", param="reserve")
    lease, address = here.receiver.prepare(request_id, prompt, end, 0, lease_s)
    return {"lease_id": lease.lease_id, "kv_addr": address, "match_len": lease.begin}


def start(
    here: Core, lease_id: str, tokens: list[int], begin: int | None, fence: bool
) -> dict[str, Any]:
    """Turn a lease whose KV has landed into a start. Raises as `KVCache.start_lease`."""
    number = SeqId(next(_numbers))
    length = here.receiver.start(LeaseId(lease_id), number, tokens, begin, fence=fence)
    started = here.starts[number]
    if started is not None:
        full = length // here.layout.page_size
        here.pages.publish(tokens[: full * here.layout.page_size], started.pages[:full])
    return {"start": number, "length": length}


def end_start(here: Core, start: int) -> dict[str, Any]:
    """Drop a start whose request has ended or was never made. Idempotent."""
    here.starts.end(SeqId(start))
    return {}


def await_landed(here: Core, lease_id: str, wanted: int) -> dict[str, Any]:
    """Have a note sent once `wanted` tokens have landed or the lease has ended."""
    lease = here.receiver.leases.get(LeaseId(lease_id))
    here.watch(lease_id, lease.slot, lease.nonce, min(wanted, lease.room))
    return {}


def commit(here: Core, lease_id: str) -> dict[str, Any]:
    """Publish a landed lease to the prefix cache, and end it."""
    return {"tokens": here.receiver.commit(LeaseId(lease_id))}


def release(here: Core, lease_id: str) -> dict[str, Any]:
    """End a lease. Idempotent."""
    with suppress(LeaseExpired, UnknownLease):
        here.receiver.release(LeaseId(lease_id))
    return {}


def pin(here: Core, prompt: list[int]) -> dict[str, Any]:
    """Protect the cached part of a prompt from eviction."""
    return {"tokens": here.pages.pin(prompt)}


def unpin(here: Core, prompt: list[int]) -> dict[str, Any]:
    """End that protection. Idempotent."""
    return {"tokens": here.pages.unpin(prompt)}


def open_send(
    here: Core, request_id: str, prompt: list[int], begin: int, end: int, kv_addr: str
) -> dict[str, Any]:
    """Begin a send. `whole`: everything is cached, and no request of vLLM's is needed."""
    return {"whole": here.sends.open(request_id, prompt, begin, end, kv_addr).whole}


def end_send(here: Core, request_id: str) -> dict[str, Any]:
    """End a send, whatever has become of it. Idempotent."""
    here.sends.end(request_id)
    return {}


def state(here: Core) -> dict[str, Any]:
    """Return the leases, after those that have expired are ended."""
    here.sends.reap()
    expired = here.receiver.sweep()
    now = time.monotonic()
    return {
        "expired": len(expired),
        "quarantined": here.receiver.leases.quarantined,
        "leases": [
            {
                "lease_id": lease.lease_id,
                "request_id": lease.request_id,
                "state": lease.state,
                "begin": lease.begin,
                "end": lease.end,
                "landed": lease.landed,
                "expires_ms": max(round((lease.deadline - now) * 1000), 0),
            }
            for lease in here.receiver.leases.live()
        ],
    }


def check(here: Core) -> dict[str, Any]:
    """Check that every reference to a block has an owner. Raises `Internal`."""
    here.check()
    return {}


CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    call.__name__: call
    for call in (
        hello, prep_recv, start, end_start, await_landed, commit, release, pin, unpin, open_send,
        end_send, state, check,
    )
}  # fmt: skip
