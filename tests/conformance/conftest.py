"""Engines that all strategies here share; each strategy has a router of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from ground import Ground, ground


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny() -> AsyncIterator[Ground]:
    async with ground("tiny") as engines:
        yield engines


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def smollm2() -> AsyncIterator[Ground]:
    async with ground("smollm2") as engines:
        yield engines
