"""`strategy check` on real engines."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import click

from router.base import StartFailed, root_cause
from router.cli.preflight import Mistake
from router.conformance import ALL, run_checks, set_up

__all__ = ["check_conformance"]


def check_conformance(
    strategy: str,
    params: Mapping[str, Any],
    *,
    model: str,
    only: Collection[str],
    backend: Literal["microserve", "vllm"] = "microserve",
    flags: Sequence[Sequence[str]] = (),
) -> bool:
    """Compare a strategy on real engines with a single engine, and print the result of each check.

    `backend` is what computes in the engines, and `flags` are further flags of the first ones,
    which the one that they are compared with does not get. `only` names the checks to run; empty:
    all. Returns whether all passed. Raises `Mistake` if the processes do not start.
    """
    checks = [check for check in ALL if not only or check.__name__ in only]

    async def run() -> bool:
        click.echo(f"starting engines with {model} …", err=True)
        failed, requests = 0, 0
        async with set_up(model, strategy, params, backend, flags) as (deployment, oracle):
            if not deployment.resumes:
                click.echo("answers that lose their engine are greedy: no others resume exactly")
            async for result in run_checks(deployment, oracle, checks):
                click.echo(str(result))
                failed += bool(result.problem)
                requests += result.requests
        verdict = f"{failed} of {len(checks)} checks failed" if failed else "ok"
        click.echo(f"{strategy}: {verdict}, {requests} requests to engines with {model}")
        return not failed

    try:
        return asyncio.run(run())
    except (StartFailed, ExceptionGroup) as error:
        cause = root_cause(error)
        if not isinstance(cause, StartFailed):
            raise
        raise Mistake(str(cause).strip().splitlines()[-1]) from None
