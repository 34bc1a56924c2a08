"""Workloads by name or from a file, at the rate that the user wants."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from engine.protocol import BadRequest
from router.workload import lengths
from router.workload.arrivals import evenly, gamma, poisson
from router.workload.bodies import bodies, is_body
from router.workload.conversations import Conversations
from router.workload.files import bad_line, numbered_lines
from router.workload.prompts import synthetic
from router.workload.request import MOST_TOKENS, LoadRequest, timed
from router.workload.trace_formats import format_of
from router.workload.traces import Trace

__all__ = ["ARRIVALS", "WORKLOADS", "Workload", "WorkloadConfig", "open_workload"]

Arrivals = Literal["poisson", "gamma", "fixed"]
ARRIVALS: tuple[str, ...] = get_args(Arrivals)

WORKLOADS = ("fixed", "paper", "sharegpt", "long", "prefix-sharing")
# Tokens of prompt and answer, unless the user says others.
LENGTHS = {
    "fixed": (256, 64),
    "paper": (3000, 100),  # the microserving paper, §4.1
    "long": (4096, 64),
    "prefix-sharing": (128, 128),  # of a turn's new part, and of its answer
}
PAPER_SIGMA = 5.0  # of both lengths

# Lengths distributed like those of ShareGPT's conversations: log-normal (median, sigma), clipped.
# The means are the microserving paper's (§4.1): 200 tokens in and 260 out.
SHAREGPT_IN, SHAREGPT_OUT, SHAREGPT_CLIP = (101.4, 1.3), (171.8, 1.0), (4, 1024)


@dataclass(frozen=True, slots=True)
class WorkloadConfig:
    """What a user says of a workload."""

    name: str = "fixed"  # one of `WORKLOADS`, or the path of a file
    seed: int = 0
    input: int | None = None  # tokens of a prompt; `None`: the workload's default
    output: int | None = None
    rate: float | None = None  # requests per second; `None`: a trace's own times, or none
    arrivals: Arrivals = "poisson"
    cv: float = 1.0  # of gamma arrivals
    speed: float = 1.0  # of a trace's own times
    scale: float = 1.0  # of a trace's lengths


DEFAULT = WorkloadConfig()


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, made or read as they are taken. The same configuration gives the same ones."""

    kind: str  # its name, or the kind of its file
    requests: Iterator[LoadRequest]
    count: int | None = None  # `None`: endless
    timed: bool = False  # whether the requests have times


def open_workload(config: WorkloadConfig) -> Workload:
    """Return a workload. Its file, if any, has been checked to its end.

    Raises `BadRequest` for an unknown name, a setting without effect on the workload, and a file
    that is none, naming the line.
    """
    if config.rate is None and config.arrivals != "poisson":
        raise BadRequest(f"{config.arrivals} arrivals need a rate")
    if config.arrivals != "gamma":
        _refuse(config, f"{config.arrivals} arrivals", "cv")
    if config.name in WORKLOADS:
        return _named(config)
    return _from_file(config, Path(config.name))


def _named(config: WorkloadConfig) -> Workload:
    _refuse(config, f"the workload {config.name}", "speed", "scale")
    if max(config.input or 1, config.output or 1) > MOST_TOKENS:
        raise BadRequest(f"a prompt or an answer has {MOST_TOKENS} tokens at most")
    if config.name == "prefix-sharing":
        return _conversations(config)
    return _at_rate(
        config, config.name, synthetic(f"{config.name} {config.seed}", *_lengths(config))
    )


def _lengths(config: WorkloadConfig) -> tuple[Iterator[int], Iterator[int]]:
    seed_in, seed_out = f"{config.seed} in", f"{config.seed} out"
    if config.name == "sharegpt":
        _refuse(config, "the workload sharegpt", "input", "output")
        return (
            lengths.lognormal(seed_in, *SHAREGPT_IN, *SHAREGPT_CLIP),
            lengths.lognormal(seed_out, *SHAREGPT_OUT, *SHAREGPT_CLIP),
        )
    tokens_in, tokens_out = _tokens(config)
    if config.name == "paper":
        return (
            lengths.normal(seed_in, tokens_in, PAPER_SIGMA),
            lengths.normal(seed_out, tokens_out, PAPER_SIGMA),
        )
    if config.name == "long":
        return lengths.uniform(seed_in, tokens_in // 2, tokens_in), lengths.fixed(tokens_out)
    return lengths.fixed(tokens_in), lengths.fixed(tokens_out)


def _conversations(config: WorkloadConfig) -> Workload:
    tokens_in, tokens_out = _tokens(config)
    conversations = Conversations(new_tokens=tokens_in, answer_tokens=tokens_out)
    if config.rate is None:  # clients take turns in the order of one request per second
        requests = conversations.requests(config.seed, evenly(1 / conversations.turns))
        return Workload(config.name, (replace(request, at_s=None) for request in requests))
    starts = _times(config, config.rate / conversations.turns)
    return Workload(config.name, conversations.requests(config.seed, starts), timed=True)


def _tokens(config: WorkloadConfig) -> tuple[int, int]:
    tokens_in, tokens_out = LENGTHS[config.name]
    return config.input or tokens_in, config.output or tokens_out


def _from_file(config: WorkloadConfig, path: Path) -> Workload:
    if not _exists(path):
        names = ", ".join(WORKLOADS)
        raise BadRequest(f"{config.name} is no file and none of the workloads {names}")
    number, first = next(numbered_lines(path), (0, ""))
    if not first:
        raise BadRequest(f"{path}: the file is empty")
    if format := format_of(first):
        return _trace(config, Trace.read(path, format))
    if not is_body(first):
        raise bad_line(path, number, "neither a line of a trace nor a request body")
    _refuse(config, "a file of request bodies", "input", "speed", "scale")
    return _at_rate(config, "jsonl", bodies(path, config.output or LENGTHS["fixed"][1]))


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # the name is too long, for instance
        return False


def _trace(config: WorkloadConfig, trace: Trace) -> Workload:
    _refuse(config, "a trace", "input", "output")
    kind = trace.format.name
    requests = trace.requests(config.seed, speed=config.speed, scale=config.scale)
    if config.rate is None:
        return Workload(kind, requests, trace.count, timed=True)
    _refuse(config, "a trace at another rate", "speed")
    return _at_rate(config, kind, requests, trace.count)


def _at_rate(
    config: WorkloadConfig, kind: str, requests: Iterator[LoadRequest], count: int | None = None
) -> Workload:
    if config.rate is None:
        return Workload(kind, requests, count)
    return Workload(kind, timed(requests, _times(config, config.rate)), count, timed=True)


def _times(config: WorkloadConfig, rate: float) -> Iterator[float]:
    if config.arrivals == "gamma":
        return gamma(config.seed, rate, config.cv)
    return poisson(config.seed, rate) if config.arrivals == "poisson" else evenly(rate)


def _refuse(config: WorkloadConfig, what: str, *settings: str) -> None:
    """Raise `BadRequest` if one of the settings is given, since it has no effect on `what`."""
    for setting in settings:
        if getattr(config, setting) != getattr(DEFAULT, setting):
            raise BadRequest(f"{setting} has no effect on {what}")
