"""All checks, one after the other, and what became of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from router.conformance.checks import CHECKS
from router.conformance.deployment import Deployment
from router.conformance.faults import FAULTS
from router.conformance.trial import CheckFailed, Trial

__all__ = ["ALL", "Check", "Result", "run_checks"]

Check = Callable[[Trial], Awaitable[None]]
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
        name = self.name.replace("_", " ")
        if self.problem:
            return f"FAILED  {name}: {self.problem}"
        return f"ok      {name}: {self.about} ({self.requests} requests, {self.seconds:.1f} s)"


async def run_checks(
    deployment: Deployment, checks: Sequence[Check] = ALL
) -> AsyncIterator[Result]:
    """Run `checks`, each on what the one before it has left; the next goes on after a failure."""
    for check in checks:
        name, began = getattr(check, "__name__", ""), time.monotonic()
        trial, problem = Trial(deployment, name), ""
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
        about = (check.__doc__ or "").strip()
        yield Result(name, about, trial.requests, time.monotonic() - began, problem)
