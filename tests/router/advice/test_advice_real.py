"""Advice from what real engines tell of their own steps and puts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.rollout import Catalog

pytestmark = [pytest.mark.processes, pytest.mark.slow]


async def serve(r: Any, first: int, requests: int) -> None:
    """Send requests of different lengths, four at a time, so that decodes share steps."""

    async def one(number: int) -> None:
        prompt = [11 + (number * 131 + 7 * i) % 480 for i in range(20 + 53 * (number % 13))]
        body = {"prompt": prompt, "max_tokens": 12, "ignore_eos": True, "temperature": 0}
        status, reply = await r.post("/v1/completions", body)
        assert status == 200, reply

    for start in range(first, first + requests, 4):
        await asyncio.gather(*(one(number) for number in range(start, start + 4)))


async def test_engines_are_as_fast_as_their_own_steps(route_real):
    async with route_real() as r:
        await serve(r, 0, 28)
        r.use(Catalog()["prefill_decode"])
        await serve(r, 28, 16)
        asked = {"seeds": 2, "candidates": [{"name": "data_parallel"}]}
        status, advice = await r.post("/admin/advise", asked)
        assert status == 200, advice
        assert advice["traffic"]["requests"] == 44
        for engine in advice["engines"]:
            assert engine["steps"] == "its own steps", advice["notes"]
            assert engine["puts"] == "its own puts"
            assert engine["covers"]["prompt_tokens"][1] == 512  # a whole budget
            assert engine["fit"]["decode"]["points"] > 0
        # A busy host scatters the steps of a small model.
        assert all("the latency model fits badly" in note for note in advice["notes"]), advice
        rows = {row["title"]: row for row in advice["ranking"]}
        assert set(rows) == {"prefill_decode", "data_parallel"}
        for row in rows.values():
            assert (row["failed"], row["completed"]) == (None, 44)
            assert 0 < row["ttft_ms"] <= row["jct_ms"]
        assert rows["prefill_decode"]["current"] and rows["prefill_decode"]["gain"] == 0.0
