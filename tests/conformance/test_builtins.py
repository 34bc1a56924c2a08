"""Every installed strategy passes every check; with `make conformance` on a real model as well."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
from ground import Ground

from router.conformance.deployment import routed
from router.conformance.suite import ALL, run_checks

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
# Of those that have params, what is tried; of the others their defaults.
PARAMS: dict[str, list[dict[str, Any]]] = {
    "balanced": [{"ratio": 0.3}, {"ratio": "auto"}],
    "replicate": [{"every": 4}],
}
INSTALLED = sorted(entry_points(group="microserve.strategies").names)
CASES = [
    pytest.param(name, params, id=" ".join((name, *(f"{k}={v}" for k, v in params.items()))))
    for name in INSTALLED
    for params in PARAMS.get(name, [{}])
]


async def passes(ground: Ground, strategy: str, params: dict[str, Any]) -> None:
    async with routed(ground.nodes, strategy, params) as deployment:
        results = [result async for result in run_checks(deployment, ground.oracle)]
    print(*results, sep="\n")
    assert len(results) == len(ALL)
    assert not [str(result) for result in results if result.problem]


@pytest.mark.parametrize(("strategy", "params"), CASES)
async def test_on_tiny(tiny: Ground, strategy: str, params: dict[str, Any]) -> None:
    await passes(tiny, strategy, params)


@pytest.mark.conformance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("strategy", "params"), CASES)
async def test_on_smollm2(smollm2: Ground, strategy: str, params: dict[str, Any]) -> None:
    await passes(smollm2, strategy, params)
