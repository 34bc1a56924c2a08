"""The end of a router: what it waits for, and for how long."""

from __future__ import annotations

import asyncio

from virtual_time import in_virtual_time

from router.admission.shutdown import Shutdown


class Asked:
    """A request that counts how often it was asked to end."""

    def __init__(self, shutdown: Shutdown) -> None:
        self.asked = 0
        self._shutdown = shutdown
        shutdown.request_begins(self.end)

    def end(self) -> None:
        self.asked += 1
        self.over()

    def over(self) -> None:
        self._shutdown.request_ends(self.end)


@in_virtual_time
async def test_it_waits_for_the_last_request_and_no_longer():
    loop, shutdown = asyncio.get_running_loop(), Shutdown()
    assert not shutdown.begun
    Asked(shutdown).over()  # before it begins, the end of the only request means nothing
    first, second = Asked(shutdown), Asked(shutdown)
    loop.call_later(1.0, first.over)
    loop.call_later(2.0, second.over)
    assert await shutdown.finish(60.0) == 0
    assert (loop.time(), shutdown.begun) == (2.0, True)
    assert (first.asked, second.asked) == (0, 0)


@in_virtual_time
async def test_it_waits_no_longer_than_its_bound_and_tells_how_many_run():
    loop, shutdown = asyncio.get_running_loop(), Shutdown()
    requests = [Asked(shutdown) for _ in range(3)]
    loop.call_later(1.0, requests[0].over)
    assert await shutdown.finish(5.0) == 2
    assert loop.time() == 5.0
    shutdown.end_requests()
    assert [one.asked for one in requests] == [0, 1, 1]
    assert await shutdown.finish(5.0) == 0
    assert loop.time() == 5.0


@in_virtual_time
async def test_it_can_be_hurried():
    loop, shutdown = asyncio.get_running_loop(), Shutdown()
    Asked(shutdown)
    loop.call_later(1.0, shutdown.hurry)
    assert await shutdown.finish(60.0) == 1
    assert loop.time() == 1.0
    assert await Shutdown().finish(60.0) == 0
    assert loop.time() == 1.0
