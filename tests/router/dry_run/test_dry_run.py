"""Dry runs of strategies: which pass, which fail, and the line that the error names."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from engine.protocol import BadRequest
from engine.virtual import output_tokens
from engine.virtual.loop import VirtualLoop
from router.dry_run.dry_run import DryRunFailed, dry_run, trial
from router.dry_run.dry_run_process import dry_run_source, dry_run_strategy
from router.rollout.catalog import Catalog
from router.simulation.fleet import VirtualCalls

HEAD = """import asyncio, itertools, time
from router import Chunk, strategy

@strategy
async def mine(request, cluster):
    engine = cluster.engines.least_loaded()
    decode = cluster.decode.least_loaded()
    prefill = cluster.prefill.least_loaded(exclude=decode)
    end = len(request.tokens) - 1
"""
FIRST_LINE = HEAD.count("\n") + 1

# Each mistake: a body, its line that the message names (if any), and a part of the message.
WRONG = {
    "drops a token": (
        """
        chunks = engine.start_generate(request)
        await anext(chunks)
        async for chunk in chunks:
            yield chunk
        """, None, "it yielded the tokens",
    ),
    "repeats after a failure": (
        """
        async for chunk in engine.start_generate(request):
            if chunk.finish_reason and request.output:
                yield Chunk(token_ids=request.output)
            yield chunk
        """, None, "an engine dies in mid-stream",
    ),
    "raises for one length": (
        """
        async for chunk in engine.start_generate(request):
            yield chunk
            1 / (len(request.prompt) - 17)
        """, 2, "ZeroDivisionError",
    ),
    "out of range": (
        """
        async with decode.prep_recv(request, end=end) as kv:
            await prefill.remote_send(request, kv, begin=0, end=end + 1)
            async for chunk in decode.start_generate(request, begin=end, kv=kv):
                yield chunk
        """, None, "is not in the lease",
    ),
    "sends from the beginning though some is there": (
        """
        async with decode.prep_recv(request, end=end) as kv:
            if end:
                await prefill.remote_send(request, kv, begin=0, end=end)
            async for chunk in decode.start_generate(request, begin=end, kv=kv):
                yield chunk
        """, None, "warm",
    ),
    "waits for nothing": (
        """
        if len(cluster.engines) > 2:
            await asyncio.Event().wait()
        async for chunk in engine.start_generate(request):
            yield chunk
        """, 1, "made no progress",
    ),
    "swallows its cancellation": (
        """
        try:
            async for chunk in engine.start_generate(request):
                yield chunk
        except asyncio.CancelledError:
            async for chunk in engine.start_generate(request):
                yield chunk
        """, None, "cancelled after",
    ),
    "leaves a task": (
        """
        asyncio.create_task(asyncio.sleep(9))
        async for chunk in engine.start_generate(request):
            yield chunk
        """, None, "leaves 1 task",
    ),
    "blocks": (
        """
        time.sleep(0.5)
        async for chunk in engine.start_generate(request):
            yield chunk
        """, 0, "holds up the event loop",
    ),
    "spins": (
        """
        while True:
            pass
        yield
        """, None, "holds up the event loop",
    ),
    "no chunk": ("\n        yield 'hello'\n", None, "no chunk but 'hello'"),
}  # fmt: skip


def source_of(body: str) -> str:
    lines = [line[4:] for line in body.strip("\n").rstrip().splitlines()]
    return HEAD + "\n".join(lines) + "\n"


@pytest.mark.parametrize("what", WRONG)
def test_each_mistake_is_found_and_its_line_is_named(what):
    body, line, says = WRONG[what]
    mine = Catalog().load(source_of(body), file="dir/mine.py")
    with pytest.raises(DryRunFailed) as wrong:
        dry_run(mine.bind({}))
    assert says in wrong.value.message
    assert "[dry run: " in wrong.value.message and "1 tokens" not in wrong.value.message
    if line is not None:
        assert f"mine.py:{FIRST_LINE + line}" in wrong.value.message


@pytest.mark.slow
def test_a_long_wait_costs_nothing():
    """Long waits and timeouts take no real time, because virtual time jumps over them."""
    body = """
        await asyncio.sleep(20)
        try:
            async with asyncio.timeout(25):
                await asyncio.Event().wait()
        except TimeoutError:
            pass
        async for chunk in engine.start_generate(request):
            yield chunk
    """
    mine = Catalog().load(source_of(body), file="mine.py")
    began = time.process_time()
    assert dry_run(mine.bind({})) > 100
    assert time.process_time() - began < 10


@pytest.mark.parametrize("ratio", [0.5, "auto"])
async def test_built_in_strategies_pass_in_a_child_process(ratio):
    assert (await dry_run_strategy("balanced", {"ratio": ratio})).requests > 100


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os\nos._exit(7)\n", "ended its process \\(7\\)"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "ended its process"),
        ("while True: pass\n", "did not get through a dry run in 3 s"),
        ("print('noise')\n1/0\n", "mine.py:2: ZeroDivisionError"),
        (HEAD + "    yield\n", "no chunk"),
    ],
)
@pytest.mark.slow
async def test_a_failure_of_the_child_process_is_reported(source, says):
    timeout_s = 3 if "in 3 s" in says else 60  # a busy host takes long to start a process
    with pytest.raises(BadRequest, match=says):
        await dry_run_source(source, file="mine.py", timeout_s=timeout_s)


async def test_a_wrong_parameter_is_refused_before_the_run():
    with pytest.raises(BadRequest, match="ratio=2") as wrong:
        await dry_run_strategy("balanced", {"ratio": 2})
    assert wrong.value.param == "params.ratio"


@pytest.mark.parametrize("every", [1, 2])
def test_a_virtual_replica_survives_its_engine(monkeypatch, every):
    """The next attempt begins where the replica ends."""
    begun: list[dict[str, Any]] = []
    leases: list[str] = []
    start, prepare = VirtualCalls.start_generate, VirtualCalls.prep_recv

    async def noted(self, body, headers):
        begun.append(dict(body, output=list(body.get("output", ()))))
        return await start(self, body, headers)

    async def leased(self, body, headers):
        reply = await prepare(self, body, headers)
        leases.append(reply.lease_id)
        return reply

    monkeypatch.setattr(VirtualCalls, "start_generate", noted)
    monkeypatch.setattr(VirtualCalls, "prep_recv", leased)
    prompt = [5, 6, 7] * 20

    async def resumed() -> list[int]:
        bound = Catalog().find("replicate").bind({"every": every})
        async with trial(bound, ("any", "any", "any"), dies_after=[4]) as tried:
            return await tried.generate(prompt)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(resumed()) == output_tokens(prompt, 6)
    first, second = begun
    assert first["mirror"]["every"] == every and "lease_id" not in first
    assert second["lease_id"] == leases[0]
    assert "begin" not in second and len(second["output"]) == 4
