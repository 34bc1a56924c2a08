"""Strategies that block the event loop of real routers are named, interrupted and replaced."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from forked import ForkedProcess, run_microserve
from router_process import RouterProcess, until

from router.base.errors import StrategyBlocked
from router.dry_run.dry_run import trial
from router.rollout.catalog import Catalog
from router.supervision.child_tasks import adopting
from router.supervision.interruption import Interrupted
from router.supervision.watchdog import Watchdog
from router.telemetry.metrics import Metrics

# The strategy blocks if the first token of the prompt is 499, which no dry run uses.
STRATEGY = '''
import asyncio, re, time
from router import strategy

def spin():
    while True:
        pass

async def spin_in_a_task():
    while True:
        pass

@strategy
async def blocks(request, cluster, *, how: str = ""):
    """Blocks for some prompts."""
    engine = cluster.engines.round_robin()
    if request.prompt[0] == 499:
        if how == "loop":
            spin()
        elif how == "polling":
            while engine.load >= 0:
                pass
        elif how == "task":
            await asyncio.create_task(spin_in_a_task())
        elif how == "sleep":
            time.sleep(2.0)
        elif how == "for good":
            while True:
                try:
                    spin()
                except BaseException:
                    pass
    async for chunk in engine.start_generate(request):
        yield chunk
'''
BAD, GOOD = [499, 2, 3], [1, 2, 3]


@pytest.fixture
def blocks(tmp_path: Path) -> Path:
    file = tmp_path / "blocks.py"
    file.write_text(STRATEGY)
    return file


@pytest.fixture
def router(real_engines: list[str], blocks: Path) -> Iterator[RouterProcess]:
    router = RouterProcess(real_engines, blocks, "--block-limit-s", "0.2")
    yield router
    router.kill()


@pytest.mark.processes
@pytest.mark.slow
def test_a_blocking_strategy_is_interrupted_and_disabled_after_three_times(router):
    wanted = router.tokens(GOOD, 8)
    for violations, how in enumerate(("loop", "polling", "task"), 1):
        # A swap would begin another generation with its own violations.
        router.http.put("/admin/strategy", json={"name": "data_parallel"})
        generation = router.use("blocks", how=how)
        began = time.monotonic()
        reply = router.ask(BAD)
        assert time.monotonic() - began < 5
        assert reply.status_code == 500, reply.text
        error = reply.json()["error"]
        assert error["type"] == "strategy_blocked"
        assert f"blocks (generation {generation})" in error["message"]
        assert re.search(r"\(blocks\.py:\d+\)", error["message"]), error
        assert router.tokens(GOOD, 8) == wanted
        assert router.strategies()["active"]["offences"] == {"blocked": 1}
        assert router.log.count("holds up the event loop, for") == violations
    assert "in spin\n" in router.log  # the stack
    for _ in range(2):
        assert router.ask(BAD).status_code == 500
    active = until(lambda: (s := router.strategies()["active"])["name"] != "blocks" and s)
    assert active["name"] == "data_parallel"
    assert router.tokens(BAD)
    entry = router.http.get("/admin/audit").json()["entries"][-1]
    assert (entry["who"], entry["what"]) == ("router", "rollback")
    assert "held up the event loop 3 times" in entry["why"]
    metrics = router.http.get("/metrics").text
    assert f'generation="{generation}",kind="blocked",strategy="blocks"' in metrics


@pytest.mark.processes
@pytest.mark.slow
def test_a_call_that_cannot_be_interrupted_is_named_while_it_lasts(router):
    router.use("blocks", how="sleep")
    slow = threading.Thread(target=router.ask, args=(BAD,))
    slow.start()
    until(lambda: "holds up the event loop" in router.log)
    assert slow.is_alive()
    assert "time.sleep(2.0)" in router.log
    slow.join()
    assert router.tokens(GOOD)
    assert router.strategies()["active"]["offences"] == {"blocked": 1}
    said = router.ask(BAD).json()["error"]
    assert said["type"] == "strategy_blocked" and "(blocks.py:" in said["message"]


LATE = """
import random, time
from router import strategy

@strategy
async def late(request, cluster):
    until = time.perf_counter() + random.uniform(0, 0.09)
    while time.perf_counter() < until:
        pass
    if random.random() < 0.3:
        3**200000
    async for chunk in cluster.engines.least_loaded().start_generate(request):
        yield chunk
"""


@pytest.mark.slow
async def test_only_the_blocking_strategy_is_interrupted():
    """Run strategies that end or begin to wait just before they would be interrupted.

    The exception is raised in the strategy or not at all.
    """
    random.seed(1)
    late, stray, beats = Catalog().load(LATE, file="late.py").bind({}), [], 0
    over = asyncio.Event()

    async def innocent():
        nonlocal beats
        while not over.is_set():
            try:
                beats += sum(1 for _ in range(100))
                await asyncio.sleep(0)
            except Interrupted:
                stray.append(beats)

    loop, outcomes = asyncio.get_running_loop(), Counter()
    loop.set_exception_handler(lambda loop, context: stray.append(context))
    with adopting(loop), Watchdog(Metrics(), 0.02).watching():
        async with (
            trial(late, ("any", "any")) as tried,
            asyncio.TaskGroup() as others,
        ):
            others.create_task(innocent())
            # On a busy machine the watchdog is late; repeat until it interrupts a strategy.
            while sum(outcomes.values()) < 45 or len(outcomes) < 2:
                asks = [tried.generate(list(range(1, 20 + i))) for i in range(3)]
                for answer in await asyncio.gather(*asks, return_exceptions=True):
                    outcomes[type(answer)] += 1
            over.set()
    assert not stray
    assert set(outcomes) == {list, StrategyBlocked}, outcomes
    assert beats


@pytest.mark.processes
@pytest.mark.slow
def test_up_restarts_a_router_that_hangs_for_good(tmp_path, blocks):
    state = tmp_path / "state.json"
    up = ForkedProcess(
        run_microserve, "up", "tiny", "--engines", "1", "--port", "0", "--threads", "1",
        "--pool-pages", "256", "--strategy", str(blocks), "--param", "how=for good",
        "--state-file", str(state), "--health-deadline-s", "3",
    )  # fmt: skip
    try:
        until(state.exists, 120)
        before = json.loads(state.read_text())["router"]
        body = {"prompt": BAD, "max_tokens": 2}
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"{before['url']}/v1/completions", json=body, timeout=30)
        after = until(lambda: (s := json.loads(state.read_text())["router"]) != before and s, 60)
        assert after["url"] == before["url"]
        body["prompt"] = GOOD
        reply = httpx.post(f"{after['url']}/v1/completions", json=body, timeout=30)
        assert reply.status_code == 200
        assert "has not answered for 3 s and is killed" in up.log
        assert "blocks (generation 1) holds up the event loop" in up.log
    finally:
        up.signal(signal.SIGTERM)
        assert up.wait() == 0
        up.kill()
