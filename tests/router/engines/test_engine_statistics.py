"""What the router accepts as an engine's statistics of its steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_engine_client import client

from router.base.errors import BadReply
from router.engines.client import STATISTICS

STEP, PUT = [64, 4096, 2, 300, 0.02], [4096, 1e-4]
GOOD: dict[str, Any] = {
    "steps": [STEP], "puts": [PUT], "token_budget": 512, "max_batch": 256, "max_waiting": 1024,
    "decode_slowdown": 1.5, "lease_ms": 30_000,
}  # fmt: skip


async def test_statistics_are_read_with_a_bound():
    engine, http = client(GOOD)
    told = await engine.statistics()
    assert told.steps == [tuple(STEP)] and told.puts == [tuple(PUT)]
    assert http.asked == [("GET", "/microserving/statistics", STATISTICS)]
    assert 4096 * len(str([2**31, 2**62, 2**31, 2**31, 0.12345678901234567])) < STATISTICS


@pytest.mark.parametrize(
    "lie",
    [
        {"steps": [[1, 1, 0, 0, 0.0]]},
        {"steps": [[1, 1, 0, 0, -1.0]]},
        {"steps": [[1, 1, 0, 0, float("nan")]]},
        {"steps": [[1, 1, 0, 0, 1e9]]},
        {"steps": [[-1, 1, 0, 0, 0.1]]},
        {"steps": [[1, 2**70, 0, 0, 0.1]]},
        {"steps": [[1, 1, 0, 0]]},
        {"steps": [[1, 1, 0, 0, 0.1, 0]]},
        {"steps": [["1", 1, 0, 0, 0.1]]},
        {"steps": [STEP] * 4097},
        {"steps": None},
        {"puts": [[0, 0.1]]},
        {"puts": [[1, float("inf")]]},
        {"puts": [PUT] * 1025},
        {"token_budget": 0},
        {"decode_slowdown": float("inf")},
        {"surprise": 1},
    ],
)
async def test_lies_are_refused_with_one_sentence(lie: dict[str, Any]):
    engine, _ = client({**GOOD, **lie})
    with pytest.raises(BadReply, match="no EngineStatistics") as refused:
        async with asyncio.timeout(10):
            await engine.statistics()
    assert len(refused.value.message) <= 500
