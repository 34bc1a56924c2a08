"""Runs the candidates, one confined process after the other, and ranks them."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from engine.protocol import Internal
from router.advice.candidates import Asked, Candidate, candidates
from router.advice.engine_facts import engine_facts, usable_engines
from router.advice.ranking import Result, RunFigures, rank
from router.base import Conflict, RouterConfig, bare_environment
from router.confinement import Ended, run_confined
from router.engines import Backend, Registry, Role
from router.rollout import Catalog, Revisions
from router.telemetry import RecordedRequest, Slo, Traffic, recording

__all__ = ["Advisor", "Question"]

LEAST_REQUESTS = 20
# The latest requests that are run for each seed: enough per engine, and few enough to wait for.
PER_ENGINE, FEWEST, MOST = 200, 400, 2000
FIT_S = 60.0
# Of what a process tells. The engines of a fitted fleet have a profile each.
FLEET_BYTES, RUNS_BYTES = 8 << 20, 64 << 10
WALL_S, CPU_S = 600.0, 120.0  # of one candidate, with all its seeds
NICE = 19
PIECE = 1 << 16
# One core: libraries for numbers start a thread per core otherwise.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
# Settings of the router that decide what becomes of requests.
SETTINGS = ("max_queue", "queue_timeout_s", "request_timeout_s", "attempts", "retry_share")
WORKER = "router.advice.worker"

Progress = Callable[[int, int, str], Awaitable[None]]  # done, of how many, what follows


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: for the traffic of the latest `minutes`.

    `candidates`: `None` means all strategies; with `keep_roles` under the present roles of the
    engines only. With objectives in `slo`, more goodput is better, else a shorter mean time of a
    request. `profile` is the JSON object of a
    profile, for engines whose own steps do not suffice. `seeds` is the number of runs of each.
    """

    minutes: float
    candidates: Sequence[Asked] | None = None
    keep_roles: bool = False
    slo: Slo = Slo()  # noqa: RUF009  frozen
    profile: dict[str, Any] | None = None
    seeds: int = 5


class Advisor:
    """Answers one question at a time."""

    def __init__(
        self,
        config: RouterConfig,
        registry: Registry,
        catalog: Catalog,
        revisions: Revisions,
        traffic: Traffic,
    ) -> None:
        self._config = config
        self._registry = registry
        self._catalog = catalog
        self._revisions = revisions
        self._traffic = traffic
        self._busy = False

    async def advise(self, question: Question, progress: Progress) -> dict[str, Any]:
        """Return the ranking as JSON values. Cancellation ends what runs.

        Raises `Conflict` if another question is being answered, if there is too little traffic or
        an engine is of unknown speed; `NoEngines`; and `BadRequest` or `NotFound` for a candidate
        that does not exist.
        """
        if self._busy:
            raise Conflict("the router is already being advised: ask again when that has ended")
        self._busy = True
        try:
            return await self._advise(question, progress)
        finally:
            self._busy = False

    async def _advise(self, question: Question, progress: Progress) -> dict[str, Any]:
        backends = usable_engines(self._registry)
        roles: dict[str, Role] = {backend.id: backend.role for backend in backends}
        active = self._revisions.active
        compared = candidates(
            self._catalog, active.bound, roles, question.candidates, keep_roles=question.keep_roles
        )
        recorded = self._traffic.latest(60 * question.minutes)
        requests = recorded[-min(max(PER_ENGINE * len(backends), FEWEST), MOST) :]
        self._check(requests, question.minutes)
        measured = await self._fit(backends, question.profile)
        results = []
        with _trace() as trace:
            await _write(trace, requests)
            for number, candidate in enumerate(compared):
                await progress(number, len(compared), candidate.title)
                results.append(await self._run(candidate, question, measured["fleet"], trace))
        ranking = rank(results, goodput=question.slo != Slo())
        proposal = ranking.proposal
        notes = list(measured["notes"])
        if left_out := len(recorded) - len(requests):
            notes.append(f"{left_out} earlier requests are left out")
        return {
            "traffic": {
                "requests": len(requests), "seconds": requests[-1].at_s - requests[0].at_s,
            },
            "objective": "mean JCT" if question.slo == Slo() else "goodput",
            "slo": asdict(question.slo), "seeds": question.seeds,
            "engines": measured["engines"], "notes": notes, "generation": active.number,
            "ranking": [row.describe() for row in ranking.rows],
            "keep": proposal is None, "why": ranking.why,
            "proposal": None if proposal is None else proposal.describe(),
        }  # fmt: skip

    def _check(self, requests: Sequence[RecordedRequest], minutes: float) -> None:
        if not self._traffic.seconds:
            raise Conflict("this router records no traffic: --traffic-minutes is 0")
        if not requests:
            raise Conflict(f"no request of the latest {minutes:g} minutes has ended")
        if len(requests) < LEAST_REQUESTS:
            raise Conflict(
                f"only {len(requests)} requests of the latest {minutes:g} minutes have ended; "
                f"{LEAST_REQUESTS} are needed"
            )

    async def _fit(
        self, backends: Sequence[Backend], profile: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Return the virtual fleet. Raises `Conflict` for an engine of unknown speed."""
        job = {"engines": await engine_facts(backends), "profile": profile}
        ended = await _confined("fit", job, FIT_S, FIT_S, most=FLEET_BYTES)
        if not isinstance(ended.verdict, dict):
            raise Internal(f"the engines' steps could not be fitted: {_ending(ended, FIT_S)}")
        if error := ended.verdict.get("error"):
            raise Conflict(str(error))
        return ended.verdict

    async def _run(
        self, candidate: Candidate, question: Question, fleet: list[Any], trace: int
    ) -> Result:
        """Run a candidate. Whatever it does, only its own result says so."""
        source, file = candidate.source, candidate.file
        folders = [Path()] if source else []
        if source and file == self._config.strategy:
            folders.append(Path(file).parent)
        job = {
            "source": source, "file": file, "name": candidate.name,
            "folders": [str(folder.absolute()) for folder in folders],
            "params": dict(candidate.params), "fleet": fleet, "roles": dict(candidate.roles),
            "trace": trace, "seeds": question.seeds, "slo": asdict(question.slo),
            "config": {name: getattr(self._config, name) for name in SETTINGS},
        }  # fmt: skip
        ended = await _confined("run", job, WALL_S, CPU_S, trace)
        return _result(candidate, ended, question.seeds)


async def _confined(
    function: str,
    job: dict[str, Any],
    wall_s: float,
    cpu_s: float,
    *fds: int,
    most: int = RUNS_BYTES,
) -> Ended:
    environment = {**bare_environment(), **ONE_THREAD}
    return await run_confined(
        f"{WORKER}:{function}", job, timeout_s=wall_s, cpu_s=cpu_s, nice=NICE,
        environment=environment, fds=fds, verdict_bytes=most,
    )  # fmt: skip


def _result(candidate: Candidate, ended: Ended, seeds: int) -> Result:
    """Return what came of a candidate's process. Its strategy may have said anything."""
    said = ended.verdict
    if isinstance(said, dict) and isinstance(said.get("error"), str):
        return Result(candidate, failure=said["error"])
    if isinstance(said, dict):
        try:
            runs = msgspec.convert(said.get("runs"), list[RunFigures])
        except msgspec.ValidationError:
            runs = []
        if len(runs) == seeds:
            return Result(candidate, runs)
    return Result(candidate, failure=_ending(ended, WALL_S))


def _ending(ended: Ended, wall_s: float) -> str:
    if ended.exitcode is None:
        return f"it took longer than {wall_s:g} s"
    if ended.exitcode in (-signal.SIGKILL, -signal.SIGXCPU):
        return f"it took more than {CPU_S:g} s of CPU time, or was killed"
    last = ended.tail.splitlines()[-1:] or ["it said nothing"]
    return f"it ended its process ({ended.exitcode}): {last[0][:500]}"


@contextmanager
def _trace() -> Iterator[int]:
    """Memory for a trace, which other processes read as a file."""
    trace = os.memfd_create("traffic", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        yield trace
    finally:
        os.close(trace)


async def _write(trace: int, requests: Sequence[RecordedRequest]) -> None:
    """Write a trace, and forbid everybody to change it."""
    for piece in recording(requests, PIECE):
        os.write(trace, piece)
        await asyncio.sleep(0)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(trace, fcntl.F_ADD_SEALS, seals)
