"""KV that its senders say they have sent is awaited for a bounded time."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest
from lying_engine import LyingEngine
from waiting import until

from router.base import LeaseId
from router.legs import LeaseGrant
from router.legs.arrival import arrival

PROMPT = list(range(1, 200))
ASK = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "return_token_ids": True}


@pytest.mark.slow
@pytest.mark.processes
async def test_a_request_does_not_wait_for_a_lying_sender_until_its_lease_ends(
    routed_to, real_engines
):
    """The receiver is a real engine; its lease lives for 30 s."""
    async with httpx.AsyncClient() as http:
        model = (await http.get(f"{real_engines[0]}/microserving/model")).json()
    liar = LyingEngine("silent", model=model)  # it says that it has sent whatever it is asked for
    config = {"health_timeout_s": 1.0, "strategy": "prefill_decode"}
    async with liar.serving(), routed_to([real_engines[0], liar.url], **config) as r:
        for backend in r.server.router.registry:
            backend.role = "prefill" if backend.url == liar.url else "decode"
            backend.role_pinned = True
            await backend.settled.wait()
        began = time.monotonic()
        status, body = await r.post("/v1/completions", ASK, headers={"X-Request-Id": "x"})
        took = time.monotonic() - began
        assert status == 200, body
        assert 2 < took < 15
        (retry,) = (await r.receipt("x"))["retries"]
        assert (retry["error"]["type"], retry["engines"]) == ("lease_expired", ["liar"])
        # It is released in the background, long before its end.
        async with httpx.AsyncClient() as http, asyncio.timeout(10):
            while (await http.get(f"{real_engines[0]}/microserving/state")).json()["leases"]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


class Call:
    """A `start_generate` that its engine answers when `answer` is set."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended = 0

    def end_lease(self) -> None:
        self.ended += 1

    async def wait(self, grant: LeaseGrant, begin: int) -> str:
        return await arrival(self.answer, grant, begin, 0.05, self.end_lease)


def grant() -> LeaseGrant:
    return LeaseGrant(None, LeaseId("lease"), "kv", 16, 64)  # type: ignore[arg-type]


async def test_the_time_begins_when_everything_is_sent():
    call, lease = Call(), grant()
    task = asyncio.create_task(call.wait(lease, 64))
    await asyncio.sleep(0.1)
    lease.note_sent(63)
    await asyncio.sleep(0.1)
    assert call.ended == 0
    lease.note_sent(64)
    lease.note_sent(64)
    await until(lambda: call.ended == 1)
    call.answer.set_result("stream")
    assert await task == "stream"
    lease.note_sent(64)  # nobody waits any more


async def test_what_was_sent_before_the_call_counts():
    call, lease = Call(), grant()
    lease.note_sent(64)
    lease.note_sent(32)
    task = asyncio.create_task(call.wait(lease, 64))
    await until(lambda: call.ended == 1)
    call.answer.set_exception(RuntimeError("the lease has ended"))
    with pytest.raises(RuntimeError, match="has ended"):
        await task


async def test_the_lease_of_an_answered_call_is_not_ended():
    call, lease = Call(), grant()
    lease.note_sent(64)
    task = asyncio.create_task(call.wait(lease, 64))
    await asyncio.sleep(0)
    call.answer.set_result("stream")
    await task
    await asyncio.sleep(0.1)
    assert call.ended == 0


async def test_time_in_which_the_process_was_held_up_does_not_count():
    call, lease = Call(), grant()
    lease.note_sent(64)
    task = asyncio.create_task(call.wait(lease, 64))
    await asyncio.sleep(0)
    time.sleep(0.7)  # noqa: ASYNC251  the event loop is held up
    await asyncio.sleep(0)
    assert call.ended == 0
    await until(lambda: call.ended == 1)
    call.answer.set_result("stream")
    await task
