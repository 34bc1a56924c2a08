"""All checks, one after the other, and what became of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from router.conformance.checks import CHECKS
from router.conformance.deployment import Deployment, routed
from router.conformance.engine_process import engines
from router.conformance.faults import FAULTS
from router.conformance.trial import CheckFailed, Trial

__all__ = ["ALL", "Check", "Result", "run_checks", "set_up"]


class Check(Protocol):
    """A function whose name and docstring say what it checks. Raises `CheckFailed`."""

    __name__: str

    async def __call__(self, trial: Trial) -> None: ...


ALL: tuple[Check, ...] = (*CHECKS, *FAULTS)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one check; `problem` is empty if the strategy has passed it."""

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
    model: str, strategy: str, params: Mapping[str, Any]
) -> AsyncIterator[tuple[Deployment, Deployment]]:
    """A strategy with three engines, and the oracle. Raises `StartFailed`."""
    async with (
        engines(model, 4) as (*nodes, alone),
        routed([alone], "data_parallel") as oracle,
        routed(nodes, strategy, params) as deployment,
    ):
        yield deployment, oracle


async def run_checks(
    deployment: Deployment, oracle: Deployment, checks: Sequence[Check] = ALL
) -> AsyncIterator[Result]:
    """Compare `deployment` with `oracle`, of one engine. A check that fails ends no other."""
    for check in checks:
        name, began = check.__name__, time.monotonic()
        trial, problem = Trial(name, deployment, oracle), ""
        try:
            await check(trial)
            await trial.settle("afterwards")
        except CheckFailed as failure:
            problem = str(failure)
        except ExceptionGroup as failures:
            failed, others = failures.split(CheckFailed)
            if failed is None or others is not None:
                raise
            problem = str(failed.exceptions[0])
        except TimeoutError:
            problem = "an engine that was killed has not come back"
        except (httpx.HTTPError, OSError) as error:
            said = deployment.router.log.strip().splitlines()
            problem = f"the router is gone: {said[-1] if said else error}"
        about = (check.__doc__ or "").strip()
        yield Result(name, about, trial.requests, time.monotonic() - began, problem)
