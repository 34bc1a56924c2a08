"""Every installed strategy passes the checks.

An ordinary run makes the quick checks; `make conformance` makes all of them, on SmolLM2 too.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import pytest
from testbed import Testbed

from router.conformance.deployment import deployed
from router.conformance.suite import ALL, Check, run_checks

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]
# Parameters to test; other strategies run with their defaults.
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


QUICK = [check for check in ALL if check.__name__ != "engines_that_die_later"]
# What the others do is a part of what these do, so an ordinary run makes fewer checks of them.
FULLY = ("balanced", "migrate", "replicate")
FEWER = ("lengths", "prefixes", "stops", "together", "clients_that_leave", "callees_that_die")


async def passes(
    testbed: Testbed, checks: Sequence[Check], strategy: str, params: dict[str, Any]
) -> None:
    async with deployed(testbed.engines, strategy, params) as deployment:
        results = [result async for result in run_checks(deployment, testbed.oracle, checks)]
    print(*results, sep="\n")
    assert len(results) == len(checks)
    assert not [str(result) for result in results if result.problem]


@pytest.mark.parametrize(
    ("strategy", "params"),
    [
        pytest.param(*case.values, id=case.id, marks=pytest.mark.thorough)
        if case.id in ("balanced ratio=auto", "cache_aware", "data_parallel", "prefill_decode")
        else case
        for case in CASES
        if case.id != "balanced ratio=0.3"
    ],
)
async def test_on_tiny(tiny: Testbed, strategy: str, params: dict[str, Any]) -> None:
    fewer = [check for check in QUICK if check.__name__ in FEWER]
    await passes(tiny, QUICK if strategy in FULLY else fewer, strategy, params)


@pytest.mark.conformance
@pytest.mark.parametrize(("strategy", "params"), CASES)
async def test_all_on_tiny(tiny: Testbed, strategy: str, params: dict[str, Any]) -> None:
    await passes(tiny, ALL, strategy, params)


@pytest.mark.conformance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("strategy", "params"), CASES)
async def test_all_on_mixed_splits(
    mixed_splits: Testbed, strategy: str, params: dict[str, Any]
) -> None:
    """No strategy notices how its engines are split, but by their speed."""
    await passes(mixed_splits, ALL, strategy, params)


@pytest.mark.conformance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("strategy", "params"), CASES)
async def test_all_on_smollm2(smollm2: Testbed, strategy: str, params: dict[str, Any]) -> None:
    await passes(smollm2, ALL, strategy, params)
