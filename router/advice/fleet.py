"""Virtual engines that stand for the router's own. Imported in the confined process only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from engine.latency import (
    AnyLatency,
    Fit,
    Measured,
    Profile,
    PutLatency,
    StepWork,
    doubt,
    fit_observed,
    fit_put,
    profile_fields,
    read_profile_fields,
    scatter_of,
)
from engine.protocol import BadRequest, EngineConfig
from engine.virtual import EngineKind
from router.simulation import SimulatedEngine

__all__ = ["fit_fleet", "virtual_fleet"]

Facts = dict[str, Any]
SETTINGS = ("token_budget", "max_batch", "max_waiting", "decode_slowdown", "lease_ms")
LEAST_PUTS = 4
# Where nobody has put anything yet: less than what the links of most hosts take.
ASSUMED_PUT = PutLatency(bandwidth=1e9)


def fit_fleet(engines: Sequence[Facts], given: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fleet, as `virtual_fleet` takes it, and what it rests on.

    An engine's steps are its own, or else those of all engines, or else those of the `given`
    profile; puts likewise, and at last `ASSUMED_PUT`.

    Raises `BadRequest` for a given profile that is none, and for an engine of unknown speed.
    """
    profile = None if given is None else read_profile_fields(given, "the given profile")
    fleet, told, notes = [], [], []
    all_steps = [step for one in engines for step in _steps(one)]
    all_puts = [put for one in engines for put in _puts(one)]
    for one in engines:
        speed = _speed(one, all_steps, profile)
        if speed.problem:
            notes.append(f"engine {one['id']}: {speed.problem}; {speed.source} are used")
        if speed.fit is not None and (warning := doubt(speed.fit)):
            notes.append(f"engine {one['id']}: {warning}")
        put, put_source = _put(one, all_puts, profile)
        made = Profile(
            name=one["id"], model=one["model"] or "model", device="its own", gpus=0,
            source=speed.source, layers=one["layers"], kv_bytes_per_token=one["kv_bytes_per_token"],
            context_length=one["context_length"],
            pool_tokens=max(one["pages"], 1) * one["page_size"], step=speed.latency, put=put,
            fit=speed.fit, scatter=speed.scatter,
        )  # fmt: skip
        statistics = one["statistics"] or {}
        flags = {name: statistics[name] for name in SETTINGS if name in statistics}
        flags |= {"engine_id": one["id"], "role": one["role"], "page_size": one["page_size"]}
        kind = {"capabilities": one["capabilities"], "kv": one["kv"]}
        fleet.append({"flags": flags, "profile": profile_fields(made), "kind": kind})
        told.append(
            {
                "id": one["id"], "role": one["role"], "steps": speed.source, "puts": put_source,
                "fit": None if speed.fit is None else asdict(speed.fit),
                "covers": _covers(_steps(one)),
            }
        )  # fmt: skip
    if any(one["puts"] == _ASSUMED for one in told) and len(engines) > 1:
        notes.append(
            f"no engine has put KV to another yet: {ASSUMED_PUT.bandwidth / 1e9:g} GB/s is assumed"
        )
    return {"fleet": fleet, "engines": told, "notes": notes}


def virtual_fleet(
    fleet: Sequence[dict[str, Any]], roles: dict[str, Any]
) -> tuple[SimulatedEngine, ...]:
    """Return the engines of a fitted fleet with these roles, by id."""
    return tuple(
        SimulatedEngine(
            EngineConfig(**{**one["flags"], "role": roles[one["flags"]["engine_id"]]}),
            read_profile_fields(one["profile"], one["flags"]["engine_id"]),
            EngineKind(tuple(one["kind"]["capabilities"]), one["kind"]["kv"]),
        )
        for one in fleet
    )


_OWN, _ALL, _GIVEN = "its own steps", "the steps of all engines", "those of the given profile"
_ASSUMED = "assumed"


class _Speed(NamedTuple):
    """An engine's model of steps."""

    latency: AnyLatency
    fit: Fit | None
    scatter: tuple[float, ...]
    source: str
    problem: str = ""  # why its own steps are not the source


def _speed(one: Facts, everywhere: Sequence[Measured], given: Profile | None) -> _Speed:
    try:
        return _Speed(*_fitted(_steps(one), _row_multiple(one)), _OWN)
    except BadRequest as error:
        problem: str = one["problem"] or error.message
    try:
        return _Speed(*_fitted(everywhere), _ALL, problem)
    except BadRequest as error:
        if given is not None:
            return _Speed(given.step, given.fit, given.scatter, _GIVEN, problem)
        raise BadRequest(
            f"engine {one['id']} is of unknown speed: {problem}; of all engines: {error.message}. "
            "Let it serve more, or give a profile",
            param="profile",
        ) from None


def _fitted(
    steps: Sequence[Measured], row_multiple: int = 0
) -> tuple[AnyLatency, Fit, tuple[float, ...]]:
    """Raises: `BadRequest` if the steps do not tell the coefficients."""
    latency, fit = fit_observed(steps, row_multiple)
    return latency, fit, scatter_of(latency, steps)


def _put(
    one: Facts, everywhere: Sequence[tuple[int, float]], given: Profile | None
) -> tuple[PutLatency, str]:
    for puts, source in ((_puts(one), "its own puts"), (everywhere, "the puts of all engines")):
        if len(puts) >= LEAST_PUTS:
            return fit_put(puts, one["layers"]), source
    return (given.put, _GIVEN) if given is not None else (ASSUMED_PUT, _ASSUMED)


def _steps(one: Facts) -> list[Measured]:
    statistics = one["statistics"] or {}
    return [Measured(StepWork(*step[:4]), step[4]) for step in statistics.get("steps", ())]


def _row_multiple(one: Facts) -> int:
    multiple: int = (one["statistics"] or {}).get("row_multiple", 0)
    return multiple


def _puts(one: Facts) -> list[tuple[int, float]]:
    statistics = one["statistics"] or {}
    return [(count, seconds) for count, seconds in statistics.get("puts", ())]


def _covers(steps: Sequence[Measured]) -> dict[str, list[int]]:
    """Return the smallest and the largest of each size in the steps."""
    sizes = {
        "prompt_tokens": [work.prompt_tokens for work, _ in steps if work.prompt_tokens],
        "decodes": [work.decodes for work, _ in steps if work.decodes],
        "context": [work.context // work.decodes for work, _ in steps if work.decodes],
    }
    return {name: [min(values), max(values)] for name, values in sizes.items() if values}
