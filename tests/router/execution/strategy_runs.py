"""Runs of strategies in virtual time, with the violations that they are charged with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from engine.protocol import Sampling
from router.base.config import RouterConfig
from router.base.ids import RevisionNumber
from router.base.request import Chunk, Request
from router.execution.choice_writer import ChoiceWriter
from router.execution.strategy_run import StrategyRun
from router.rollout.revisions import Revision
from router.strategy.definition import Strategy, strategy
from router.telemetry import Receipt

GRACE_S, STALL_S = 1.0, 10.0
END = Chunk(token_ids=[9], finish_reason="stop")
MINE, OTHERS = "mine", "others"  # attempts


class Writer(ChoiceWriter):
    """Keeps what the strategy yields. The client needs `reads_s` seconds for each chunk."""

    def __init__(self, receipt: Receipt) -> None:
        super().__init__(receipt)
        self.chunks: list[Chunk] = []
        self.reads_s = 0.0
        self.fails: BaseException | None = None

    def send(self, chunk: Chunk) -> Awaitable[None] | None:
        if self.fails is not None:
            raise self.fails
        self.chunks.append(chunk)
        return asyncio.sleep(self.reads_s) if self.reads_s else None


class Run:
    """A run of `function`, the violations it is charged with, and when it ended."""

    def __init__(self, function: Callable[..., Any], states: dict[Any, Any] | None = None) -> None:
        """`states` is the memory of earlier runs of the same revision."""
        self.told: list[tuple[str, str]] = []
        self.problems: list[dict[str, Any]] = []  # that no task has noticed
        asyncio.get_running_loop().set_exception_handler(
            lambda _, problem: self.problems.append(problem)
        )
        receipt = Receipt("x", RevisionNumber(1), "mine", {}, 0, 0)
        self.receipt = receipt
        self.legs: list[Any] = receipt.legs
        self.writer = Writer(receipt)
        config = RouterConfig(grace_s=GRACE_S, stall_s=STALL_S)
        attempt: Any = SimpleNamespace(
            runtime=SimpleNamespace(config=config),
            receipt=receipt,
            request_id=MINE,
            backends=[],
            delegated=receipt.delegated,
        )
        made = function if isinstance(function, Strategy) else strategy(function)
        bound = made.bind({})
        revision = Revision(RevisionNumber(2), bound, None, self._tell)
        if states is not None:
            revision.states = states
        request = Request("x", [1, 2, 3], Sampling())
        self.run = StrategyRun(revision, attempt, request, self.writer)
        self.ended_s = 0.0

    def _tell(self, revision: Revision, kind: str, message: str) -> None:
        self.told.append((kind, message))

    async def end(self, *cancelled_s: float) -> BaseException | None:
        """Run it to its end, or cancel it at these times; return its error."""
        loop = asyncio.get_running_loop()
        task = asyncio.ensure_future(self.run.finish())
        for time in cancelled_s:
            loop.call_at(time, task.cancel)
        await asyncio.wait([task])
        self.ended_s = loop.time()
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        del task
        await asyncio.sleep(100.0)  # what is left behind is noticed now
        assert not self.problems
        return error


def line(function: Any, number: int) -> str:
    """Return the place of a line of `function`, counted from its `def`."""
    code = function.__code__
    return f"({Path(code.co_filename).name}:{code.co_firstlineno + number})"
