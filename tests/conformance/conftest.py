"""Engines shared by the tests of all strategies. Each strategy gets its own router."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from testbed import Testbed, testbed


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny() -> AsyncIterator[Testbed]:
    async with testbed("tiny") as engines:
        yield engines


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def smollm2() -> AsyncIterator[Testbed]:
    async with testbed("smollm2") as engines:
        yield engines


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mixed_splits() -> AsyncIterator[Testbed]:
    """Engines whose workers share layers, have some of them each, and swap microbatches."""
    splits = ("--tp", "2"), ("--pp", "2"), ("--pp", "2", "--device-pages", "300")
    async with testbed("tiny", splits) as engines:
        yield engines
