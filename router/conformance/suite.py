"""Runs all checks in turn and reports the results."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from router.conformance.check_context import CheckContext, CheckFailed
from router.conformance.checks import CHECKS
from router.conformance.deployment import Deployment, deployed
from router.conformance.engine_process import Backend, running_engines
from router.conformance.faults import FAULTS

__all__ = ["ALL", "Check", "Result", "run_checks", "set_up"]


class Check(Protocol):
    """A function whose name and docstring are printed. Raises `CheckFailed`."""

    __name__: str

    async def __call__(self, context: CheckContext) -> None: ...


ALL: tuple[Check, ...] = (*CHECKS, *FAULTS)


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one check. `problem` is empty if the strategy passed."""

    name: str
    about: str
    requests: int
    seconds: float
    problem: str

    def __str__(self) -> str:
        if self.problem:
            return f"FAILED  {self.name}: {self.problem}"
        return f"ok      {self.name}: {self.about} ({self.requests} requests, {self.seconds:.1f} s)"


@asynccontextmanager
async def set_up(
    model: str,
    strategy: str,
    params: Mapping[str, Any],
    backend: Backend = "microserve",
    flags: Sequence[Sequence[str]] = (),
) -> AsyncIterator[tuple[Deployment, Deployment]]:
    """Start a strategy with three engines, and the oracle. Raises `StartFailed`.

    `flags` are further flags of each of the three.
    """
    async with (
        running_engines(model, 4, backend, flags) as (*engines, single),
        deployed([single], "data_parallel") as oracle,
        deployed(engines, strategy, params) as deployment,
    ):
        yield deployment, oracle


async def run_checks(
    deployment: Deployment, oracle: Deployment, checks: Sequence[Check] = ALL
) -> AsyncIterator[Result]:
    """Compare `deployment` with `oracle`, which has one engine. Continue after failed checks."""
    for check in checks:
        name, began = check.__name__, time.monotonic()
        context, problem = CheckContext(name, deployment, oracle), ""
        try:
            await check(context)
            await context.settle("afterwards")
        except CheckFailed as failure:
            problem = str(failure)
        except ExceptionGroup as failures:
            failed, others = failures.split(CheckFailed)
            if failed is None or others is not None:
                raise
            problem = str(failed.exceptions[0])
        except TimeoutError:
            problem = "a killed engine did not come back"
        except (httpx.HTTPError, OSError) as error:
            log = deployment.router.log.strip().splitlines()
            problem = f"the router is gone: {log[-1] if log else error}"
        about = (check.__doc__ or "").strip()
        yield Result(name, about, context.requests, time.monotonic() - began, problem)
