"""A mirror opened for a running generation, as its first or in place of another."""

from __future__ import annotations

import contextlib
import threading
from itertools import count
from typing import Any

import pytest
from engine_helpers import at_rest, prep, running, start
from test_mirrors import END, PROMPT, Part, lease, let_steps_wait_for_mirrors, read
from waiting import until

from engine.protocol import BadRequest, MirrorGeneration, PrepRecvReply, Release
from engine.service.engine import MicroserveEngine
from kvcache.transport import MemoryNetwork

OPTIONS: dict[str, Any] = {"max_tokens": 60, "temperature": 0.8, "seed": 3, "logprobs": 1}


def call(request_id: str, got: PrepRecvReply) -> MirrorGeneration:
    return MirrorGeneration(request_id=request_id, kv_addr=got.kv_addr, every=4)


def wait_after(engine: MicroserveEngine, steps: int, event: threading.Event) -> None:
    """Let the step loop wait for `event` after `steps` steps."""
    run, numbers = engine.loop.stepper._runner.run, count()

    def wait_and_run(chunks: Any) -> Any:
        assert next(numbers) < steps or event.wait(20)
        return run(chunks)

    engine.loop.stepper._runner.run = wait_and_run  # type: ignore[method-assign]


@pytest.mark.parametrize("before", ["none", "a dead one"])
async def test_a_running_generation_gets_a_mirror(before: str):
    """The generation continues from the second replica; the first may be gone."""
    network = MemoryNetwork()
    async with (
        running(network) as source,
        running(network, name="b") as dead,
        running(network, name="c") as replica,
    ):
        whole = await read(source, "whole", **OPTIONS)
        mirrored = threading.Event()
        let_steps_wait_for_mirrors(source)
        wait_after(source, 15, mirrored)
        first = Part()
        fields: dict[str, Any] = {}
        if before != "none":
            fields["mirror"] = {"kv_addr": lease(dead, reserve=60).kv_addr, "every": 4}
        stream = await source.start_generate(start(PROMPT, "r", **fields, **OPTIONS))
        async with contextlib.aclosing(stream.events()) as events:
            async for event in events:
                first.add(event)
                if len(first.tokens) >= 10 and not mirrored.is_set():
                    # Its prompt is that of the generation, followed by the output so far.
                    tokens = PROMPT + first.tokens
                    got = replica.prep_recv(prep(tokens, len(tokens), "m", reserve=60))
                    source.mirror(call("r", got))
                    mirrored.set()
                if len(first.tokens) >= 40:
                    break
        assert first.mirror is not None and first.mirror.stopped is None
        assert first.mirror.landed > END + 10
        rest = await read(replica, "rest", output=first.tokens, lease_id=got.lease_id, **OPTIONS)
        assert first + rest == whole + Part()
        assert rest.begin is not None
        assert END + len(first.tokens) - rest.begin <= 2 * 4 + 1
        assert source.mirrors.running == 0
        dead.release(Release(request_id="lease"))
        for engine in (source, dead, replica):
            await at_rest(engine)


async def test_an_ended_generation_gets_no_mirror_and_leaves_nothing():
    network = MemoryNetwork()
    async with running(network) as source, running(network, name="b") as replica:
        got = lease(replica, reserve=60)
        with pytest.raises(BadRequest, match="no generation"):
            source.mirror(call("r", got))
        stream = await source.start_generate(start(PROMPT, "r", max_tokens=4))
        await until(lambda: not source.running and not source.waiting)
        # The step loop has ended the generation; its reader has not seen that yet.
        source.mirror(call("r", got))
        async for _ in stream.events():
            pass
        await until(lambda: not source.loop.stepper._mirrors._mirrors)
        assert source.mirrors.running == 0
        replica.release(Release(lease_id=got.lease_id))
