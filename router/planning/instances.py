"""Instances: a model divided among GPUs, and which divisions fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from engine.latency import (
    DEVICES,
    MODELS,
    Device,
    FittedLatency,
    ModelShape,
    Profile,
    PutLatency,
    StepLatency,
    find_profile,
    pool_tokens,
    profile_names,
)
from engine.protocol import BadRequest

__all__ = [
    "Division",
    "Instance",
    "Measured",
    "fitting_instances",
    "measured_model",
    "profile_instances",
]

GIB = 1 << 30


@dataclass(frozen=True, slots=True, order=True)
class Division:
    """How the GPUs of an instance divide the model: `tp` ways each layer, `pp` ways the layers."""

    tp: int
    pp: int

    @property
    def gpus(self) -> int:
        """GPUs of the instance."""
        return self.tp * self.pp

    @property
    def whole_prefill(self) -> Division:
        """Itself, as the prefill instance of a `Pair`."""
        return self

    @property
    def whole_decode(self) -> Division:
        """Itself, as the decode instance of a `Pair`."""
        return self

    def __str__(self) -> str:
        return f"tp={self.tp} pp={self.pp}"


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance. `step` is the time of one of its `pp` stages."""

    division: Division
    step: StepLatency
    pool_tokens: int  # tokens whose KV fits
    profile: str = ""  # the name of the profile with its tp


@dataclass(frozen=True, slots=True)
class Measured:
    """A model on a device, and the latencies that are known of it."""

    model: str
    device: str
    shape: ModelShape
    memory: Device
    steps: Mapping[int, FittedLatency]  # by tp, with pp=1
    profiles: Mapping[int, str]  # their names, by tp
    put: PutLatency


def measured_model(model: str, device: str) -> Measured:
    """Return what the shipped profiles `MODEL@DEVICE` and `MODEL@DEVICE:tpN` say.

    Raises: `BadRequest` if the shape, the device or a fitted latency is not known.
    """
    if model not in MODELS:
        raise BadRequest(f"no model is called {model!r}; there are {', '.join(sorted(MODELS))}")
    if device not in DEVICES:
        raise BadRequest(f"no device is called {device!r}; there are {', '.join(sorted(DEVICES))}")
    prefix = f"{model}@{device}"
    profiles = {}
    for name in profile_names():
        base, _, parts = name.partition(":")
        if base == prefix and (not parts or parts[:2] == "tp"):
            profiles[int(parts[2:] or 1)] = find_profile(name)
    steps = {
        tp: profile.step
        for tp, profile in sorted(profiles.items())
        if isinstance(profile.step, FittedLatency)
    }
    if not steps:
        known = sorted({name.partition(":")[0] for name in profile_names()})
        raise BadRequest(
            f"no profile gives fitted latencies of {prefix}; profiles are of {', '.join(known)}"
        )
    return Measured(
        model,
        device,
        MODELS[model],
        DEVICES[device],
        steps,
        {tp: profiles[tp].name for tp in steps},
        next(iter(profiles.values())).put,
    )


def fitting_instances(
    measured: Measured, *, nodes: int, gpus_per_node: int, longest: int = 1
) -> dict[Division, Instance]:
    """Return the instances that fit: `tp` within a node, and `pp` over at most all nodes.

    `tp` divides the heads and has a measured latency, `pp` divides the layers, and beside the
    weights there is room for the KV of the longest request, in tokens (DistServe, algorithm 1).

    Raises: `BadRequest`, which says what is short, if there are none.
    """
    found, reasons = {}, []
    for tp, pp in _divisions(gpus_per_node, nodes * gpus_per_node):
        fit = _instance(measured, Division(tp, pp), longest)
        if isinstance(fit, Instance):
            found[fit.division] = fit
        else:
            reasons.append(fit)
    if not found:
        raise BadRequest(_shortage(measured, nodes, gpus_per_node, longest, reasons))
    return found


def _divisions(most_tp: int, most_gpus: int) -> Iterator[tuple[int, int]]:
    for tp in range(1, most_tp + 1):
        for pp in range(1, most_gpus // tp + 1):
            yield tp, pp


@dataclass(frozen=True, slots=True, order=True)
class _Misfit:
    """Why a division is none. The larger `weight`, the nearer it is to fitting."""

    weight: int
    gpus: int
    reason: str


def _instance(measured: Measured, division: Division, longest: int) -> Instance | _Misfit:
    shape, gpus = measured.shape, division.gpus
    if shape.heads % division.tp:
        return _Misfit(0, gpus, f"{shape.heads} heads cannot be divided by {division.tp}")
    if shape.layers % division.pp:
        return _Misfit(1, gpus, f"{shape.layers} layers cannot be divided by {division.pp}")
    try:
        pool = pool_tokens(shape, measured.memory, tp=division.tp, pp=division.pp)
    except BadRequest as error:
        return _Misfit(2, gpus, f"GPU memory: with {division}, {error.message}")
    if pool < longest:
        reason = f"{division} has room for {pool} tokens of KV, and a request has {longest}"
        return _Misfit(3, gpus, f"GPU memory: {reason}")
    if division.tp not in measured.steps:
        known = ", ".join(map(str, measured.steps))
        return _Misfit(4, gpus, f"no latency is known for tp={division.tp}, only for tp={known}")
    step = replace(measured.steps[division.tp], pp=division.pp)
    return Instance(division, step, pool, measured.profiles[division.tp])


def _shortage(
    measured: Measured, nodes: int, gpus_per_node: int, longest: int, misfits: list[_Misfit]
) -> str:
    where = f"{nodes} x {gpus_per_node} {measured.device}"
    text = f"{measured.model} does not fit {where}: {max(misfits).reason}"
    heads = measured.shape.heads
    if odd := [str(tp) for tp in range(2, gpus_per_node + 1) if heads % tp]:
        text += f"; {heads} heads cannot be divided by {', '.join(odd)}"
    larger = [
        division
        for tp in measured.steps
        for pp in range(1, measured.shape.layers + 1)
        for division in [Division(tp, pp)]
        if isinstance(_instance(measured, division, longest), Instance)
    ]
    if larger:
        least = min(larger, key=lambda division: (division.gpus, division.tp))
        text += f"; the smallest instance that fits has {least}, on {least.gpus} GPUs"
    return text


def profile_instances(
    profile: Profile, *, nodes: int, gpus_per_node: int, longest: int = 1
) -> dict[Division, Instance]:
    """Return the one instance that a profile describes, on the GPUs that it was measured on.

    Raises: `BadRequest`, which says what is short, if a node has too few GPUs or the pool too few
    tokens.
    """
    division = Division(max(1, profile.gpus), 1)
    if division.gpus > gpus_per_node:
        raise BadRequest(
            f"GPUs: {profile.name} needs {division.gpus} of a node, which has {gpus_per_node}"
        )
    if profile.pool_tokens < longest:
        raise BadRequest(
            f"GPU memory: {profile.name} has room for {profile.pool_tokens} tokens of KV, and a "
            f"request has {longest}"
        )
    return {division: Instance(division, profile.step, profile.pool_tokens, profile.name)}
