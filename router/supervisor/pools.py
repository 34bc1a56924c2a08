"""Pools of engines, and the arguments of each engine's process."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = [
    "EngineProcess",
    "Pool",
    "as_arguments",
    "engine_processes",
    "named_engines",
    "pool_arguments",
]


@dataclass(frozen=True, slots=True)
class Pool:
    """Engines that are alike. `flags` are fields of `EngineConfig`, and `arguments` win over them.

    Engines of a pool with a `name` are called `NAME-0`, `NAME-1`, …; those of all other pools share
    the numbers of `engine-0`, `engine-1`, ….
    """

    count: int
    role: str = "any"
    name: str = ""
    flags: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """One engine to start."""

    name: str
    role: str
    labels: Mapping[str, str]
    arguments: tuple[str, ...]


def engine_processes(pools: Sequence[Pool]) -> list[EngineProcess]:
    """Return the engines of all pools, in the order of the pools.

    Each has its own cores and its share of the memory. Its port is chosen when it starts, and it
    ends with this process.
    """
    members = list(named_engines(pools))
    found = []
    for (name, pool), share in zip(members, _shares(len(members)), strict=True):
        own = {
            "role": pool.role,
            "engine_id": name,
            "port": 0,
            "memory_share": f"{1 / len(members):.6f}",
            "parent_pid": os.getpid(),
        }
        found.append(EngineProcess(name, pool.role, pool.labels, pool_arguments(pool, share, own)))
    return found


def named_engines(pools: Sequence[Pool]) -> Iterator[tuple[str, Pool]]:
    """Yield the name of each engine, and its pool, in the order of the pools."""
    unnamed = itertools.count()
    numbers = {pool.name: itertools.count() for pool in pools if pool.name}
    for pool in pools:
        for _ in range(pool.count):
            yield f"{pool.name or 'engine'}-{next(numbers.get(pool.name, unnamed))}", pool


def pool_arguments(pool: Pool, share: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the arguments of an engine: those of its pool, and its `own` flags, which win.

    `share` has flags of cores and threads, unless the pool chooses them.
    """
    chosen = "cpus" in pool.flags or "threads" in pool.flags
    flags = pool.flags if chosen else {**pool.flags, **share}
    return (*as_arguments(flags), *pool.arguments, *as_arguments(own))


def as_arguments(flags: Mapping[str, Any]) -> list[str]:
    """Format config fields as arguments. `True` becomes a bare flag; `False` is left out."""
    arguments = []
    for name, value in flags.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(option)
        elif str(value).startswith("-"):  # it would be taken for a flag
            arguments.append(f"{option}={value}")
        elif value is not False:
            arguments += [option, str(value)]
    return arguments


def _shares(engines: int) -> Iterator[dict[str, Any]]:
    """Yield flags that give each of so many engines cores of its own, or one thread each."""
    cores = sorted(os.sched_getaffinity(0))
    if engines > len(cores):
        yield from ({"threads": 1} for _ in range(engines))
        return
    bounds = [len(cores) * number // engines for number in range(engines + 1)] if engines else []
    for low, high in itertools.pairwise(bounds):
        yield {"cpus": ",".join(map(str, cores[low:high])), "threads": high - low}
