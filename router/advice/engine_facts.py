"""What the engines tell about themselves: model, pool, and how long their own steps took."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from engine.protocol import EngineStatistics, MicroserveError, Unsupported
from router.base import Conflict, NoEngines
from router.engines import Backend, Registry, guard

__all__ = ["MOST_ENGINES", "engine_facts", "usable_engines"]

ASK_S = 5.0  # for all engines together
MOST_ENGINES = 64
MOST_STEPS = 16_384  # of all engines together: they are written as JSON on the event loop


def usable_engines(registry: Registry) -> list[Backend]:
    """Return the engines that requests may use. Raises `NoEngines`, or `Conflict` for too many."""
    backends = [one for one in registry if one.usable and one.model and one.state]
    if not backends:
        raise NoEngines("no engine is up")
    if len(backends) > MOST_ENGINES:
        raise Conflict(f"advice is for {MOST_ENGINES} engines at most; {len(backends)} are up")
    return backends


async def engine_facts(backends: Sequence[Backend]) -> list[dict[str, Any]]:
    """Ask all engines at once, and return what is known of each, as JSON values.

    `statistics` is `None`, and `problem` says why, if an engine does not tell in `ASK_S` seconds.
    """
    most = MOST_STEPS // len(backends)
    return list(await asyncio.gather(*(_facts(backend, most) for backend in backends)))


async def _facts(backend: Backend, most: int) -> dict[str, Any]:
    statistics, problem = None, ""
    try:
        backend.require("statistics")
        async with asyncio.timeout(ASK_S):
            statistics = await guard(backend.client.statistics(), backend)
    except Unsupported:
        problem = "it tells no statistics of its steps"
    except MicroserveError as error:
        problem = error.message
    except TimeoutError:
        problem = f"it did not tell its statistics within {ASK_S:g} s"
    model, state = backend.model, backend.state
    if model is None or state is None:  # forgotten meanwhile
        raise NoEngines(f"engine {backend.id} is gone")
    return {
        "id": backend.id, "role": backend.role, "model": model.name, "layers": model.layers,
        "kv_bytes_per_token": model.kv_bytes_per_token, "context_length": model.context_length,
        "page_size": model.page_size, "pages": state.pages.total, "kv": model.fingerprint,
        "capabilities": model.capabilities,
        "statistics": _plain(statistics, most), "problem": problem,
    }  # fmt: skip


def _plain(statistics: EngineStatistics | None, most: int) -> dict[str, Any] | None:
    """Return the fields, with the first `most` of the steps: they say most."""
    if statistics is None:
        return None
    return {**statistics.model_dump(), "steps": statistics.steps[:most]}
