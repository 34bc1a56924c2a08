"""One run of an experiment: a strategy, a fleet and a workload, in virtual time.

Everything is drawn from the workload's seed, and nothing depends on the machine: the same
experiment gives the same outcome to the bit.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from engine.protocol import BadRequest, Internal, MicroserveError
from engine.virtual import BorrowingSettings, Standstill, VirtualEngine, VirtualLoop
from router.base import Chunk, Request, RouterConfig, StrategyError, root_cause
from router.execution import ChoiceWriter
from router.simulation.fleet import VirtualFleet
from router.simulation.fleet_spec import SimulatedEngine
from router.simulation.requests import prompt_of, sampling_of
from router.simulation.router import SimulatedRouter, simulated_router
from router.strategy import Bound
from router.supervision import Watchdog, adopting
from router.telemetry import Leg, Metrics
from router.workload import LoadRequest, WorkloadConfig, open_workload

__all__ = [
    "CONFIG",
    "Death",
    "EngineUse",
    "Experiment",
    "Outcome",
    "RequestRecord",
    "run_experiment",
]

CALL_S = 1e-3  # a call over HTTP, there and back
CHUNK_TOKENS = 16  # that engines gather: fewer events, and the same times of first and last tokens
# The router learns of deaths at once, as from connections that break, so it need not ask.
CONFIG = RouterConfig(health_interval_s=1e6)
HEARTBEAT_S = 1.0  # between two looks at engines that lend or borrow: the ledger is as old
BLOCK_LIMIT_S = 2.0  # of real time
SETTLE_S = 60.0  # more than it takes until all that is borrowed has been given back
CLEAN_S = 1.0  # after the last request: more than a release takes
DRIFT_S = 1e-6  # what rounding may do to the time of one request
LONGEST_S = 8e6  # 92 days, see `VirtualLoop`
MESSAGES = 5  # different errors that an outcome counts


@dataclass(frozen=True, slots=True)
class Death:
    """An engine is killed at a time, in seconds since the start."""

    engine: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is run. The workload's requests have times; without `requests`, a trace's are all run.

    `call_s` is what a call between router and engine takes, there and back. `seed` is that of what
    is drawn beside the workload, such as the scatter of steps; `None`: the workload's.
    """

    bound: Bound
    fleet: tuple[SimulatedEngine, ...]
    workload: WorkloadConfig
    requests: int | None = None
    deaths: tuple[Death, ...] = ()
    call_s: float = CALL_S
    config: RouterConfig = CONFIG
    seed: int | None = None
    borrowing: BorrowingSettings | None = None  # of engines with `--borrow`; `None`: the usual

    @property
    def borrows(self) -> bool:
        """Whether pages are lent between engines."""
        return any(one.config.borrow for one in self.fleet)


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds, `at_s` since the start and the others since `at_s`."""

    number: int
    at_s: float
    input_tokens: int
    output_tokens: int = 0
    first_token_s: float | None = None
    end_s: float = 0.0
    retries: int = 0
    error: str = ""  # type and message
    legs: list[Leg] = field(default_factory=list)  # if they are kept

    @property
    def ok(self) -> bool:
        return not self.error and self.first_token_s is not None

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token after the first one; `None` with fewer than two tokens."""
        if self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class EngineUse:
    """How much of an engine a run has used. Shares are of the run's time and of the pool."""

    id: str
    role: str
    utilisation: float  # share of the time in steps
    busy_s: float
    steps: int
    kv_mean: float
    kv_peak: float
    put_bytes: float  # that it has sent
    died: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a run. `in_system` is the mean number of requests over `seconds`."""

    records: list[RequestRecord]
    engines: list[EngineUse]
    seconds: float
    in_system: float


# Called in the run's event loop, before the first request.
Observe = Callable[[VirtualFleet], object]


def run_experiment(
    experiment: Experiment,
    *,
    progress: Callable[[], object] = lambda: None,
    observe: Observe | None = None,
    keep_legs: bool = False,
) -> Outcome:
    """Run an experiment; `progress` is called whenever a request has ended.

    Raises `BadRequest` if the workload has no times, if an engine that shall die does not exist,
    and if the strategy fails by itself, hangs, or leaves something behind; the error names it.
    """
    for death in experiment.deaths:
        if death.engine not in (known := [one.config.engine_id for one in experiment.fleet]):
            raise BadRequest(f"no engine {death.engine!r} can die; there are {', '.join(known)}")
    run, name = _Run(experiment, progress, observe, keep_legs), experiment.bound.strategy.name
    try:
        with (
            _seeded(experiment.workload.seed if experiment.seed is None else experiment.seed),
            _few_collections(),
            asyncio.Runner(loop_factory=VirtualLoop) as runner,
        ):
            try:
                return runner.run(run.outcome())
            except BaseExceptionGroup as errors:
                raise root_cause(errors) from None
    except Standstill as still:
        raise BadRequest(
            f"{still}: strategy {name}, or what it has started, continues without ever waiting"
        ) from None
    except asyncio.CancelledError:
        raise BadRequest(f"strategy {name} has cancelled tasks that are not its own") from None


class _Run:
    def __init__(
        self,
        experiment: Experiment,
        progress: Callable[[], object],
        observe: Observe | None,
        keep_legs: bool,
    ) -> None:
        self._experiment = experiment
        self._progress = progress
        self._observe = observe
        self._keep_legs = keep_legs
        self._records: list[RequestRecord] = []
        self._in_system = 0
        self._area = 0.0  # request-seconds in the system until `_at`
        self._at = 0.0

    async def outcome(self) -> Outcome:
        experiment, loop = self._experiment, asyncio.get_running_loop()
        workload = open_workload(experiment.workload)
        count = experiment.requests or workload.count
        if not workload.timed or count is None:
            raise BadRequest(f"the workload {experiment.workload.name} needs a rate and a number")
        fleet = VirtualFleet(call_s=experiment.call_s, borrowing=experiment.borrowing)
        config = experiment.config
        if experiment.borrows and config.health_interval_s == CONFIG.health_interval_s:
            config = replace(config, health_interval_s=HEARTBEAT_S)
        engines = [fleet.add(one.config, one.profile, one.kind) for one in experiment.fleet]
        if self._observe is not None:
            self._observe(fleet)
        watchdog = Watchdog(Metrics(), BLOCK_LIMIT_S)
        with adopting(loop), watchdog.watching():
            async with simulated_router(experiment.bound, fleet, config) as router:
                for death in experiment.deaths:
                    url = next(c.url for c in engines if c.engine.config.engine_id == death.engine)
                    loop.call_at(death.at_s, router.kill, url)
                await self._drive(router, itertools.islice(workload.requests, count))
                seconds = loop.time()
                uses = [_use(calls.engine, seconds) for calls in engines]
                await self._check_clean(router)
        self._records.sort(key=lambda record: record.number)
        outcome = Outcome(self._records, uses, seconds, self._area / seconds if seconds else 0.0)
        _check_little(outcome)
        return outcome

    async def _drive(self, router: SimulatedRouter, requests: Iterator[LoadRequest]) -> None:
        """Send each request at its time, and wait until all have ended."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            for number, request in enumerate(requests):
                at = request.at_s or 0.0
                if at > LONGEST_S:
                    raise BadRequest(
                        f"request {number} arrives {at:g} s after the start: a simulation takes "
                        f"{LONGEST_S:g} s (92 days) at most"
                    )
                if (wait := at - loop.time()) > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(self._send(router, number, request, at))

    async def _send(
        self, router: SimulatedRouter, number: int, load: LoadRequest, at: float
    ) -> None:
        loop = asyncio.get_running_loop()
        prompt = prompt_of(load, number)
        request = Request(
            str(number), prompt, sampling_of(load, number), session=load.session,
            chunk_tokens=CHUNK_TOKENS,
        )  # fmt: skip
        record = RequestRecord(number, at, len(prompt))
        receipt = router.receipt(request, at)
        writer = _Counter(receipt)
        self._count(1)
        try:
            await router.run(request, writer, receipt)
        except StrategyError as error:
            raise BadRequest(_with_line(error, router)) from None
        except MicroserveError as error:
            record.error = f"{error.type}: {error.message}"
        self._count(-1)
        record.end_s = loop.time() - at
        record.output_tokens = len(writer.tokens)
        if receipt.first_token_ms is not None:
            record.first_token_s = receipt.first_token_ms / 1e3
        record.retries = len(receipt.retries)
        if self._keep_legs:
            record.legs = receipt.legs
        self._records.append(record)
        self._progress()

    def _count(self, change: int) -> None:
        now = asyncio.get_running_loop().time()
        self._area += self._in_system * (now - self._at)
        self._in_system, self._at = self._in_system + change, now

    async def _check_clean(self, router: SimulatedRouter) -> None:
        """Raise `BadRequest` if the strategy has left something behind."""
        await asyncio.sleep(CLEAN_S)
        name = router.revision.bound.strategy.name
        if router.violations:
            raise BadRequest(f"strategy {name} {router.violations[0]}")
        if left := router.left:
            raise BadRequest(f"strategy {name} left {left}")
        if self._experiment.borrows:
            await asyncio.sleep(SETTLE_S)
        router.fleet.check_integrity()


class _Counter(ChoiceWriter):
    """Keeps only the tokens."""

    def send(self, chunk: Chunk) -> None:
        pass


def _with_line(error: StrategyError, router: SimulatedRouter) -> str:
    """Return what the strategy did, with the line in which it hangs, if it does."""
    said = error.message.replace(router.revision.label, f"strategy {_name(router)}", 1)
    stalled = [message for message in router.violations if message.partition(" (")[0] in said]
    return f"strategy {_name(router)} {stalled[0]}" if stalled else said


def _name(router: SimulatedRouter) -> str:
    return router.revision.bound.strategy.name


def _use(engine: VirtualEngine, seconds: float) -> EngineUse:
    steps = engine.steps
    steps.settle()
    pool = engine.cache.bookkeeping.pages.total
    share = 1 / seconds if seconds else 0.0
    return EngineUse(
        id=engine.config.engine_id, role=engine.config.role, utilisation=steps.busy_s * share,
        busy_s=steps.busy_s, steps=steps.stepper.stats.steps,
        kv_mean=steps.pages.mean(seconds) / pool, kv_peak=steps.pages.peak / pool,
        put_bytes=engine.link.sent, died=not engine.alive,
    )  # fmt: skip


def _check_little(outcome: Outcome) -> None:
    """Check Little's law, in any order of service: mean number = rate x mean time in the system.

    Raises `Internal` if it does not hold: then times were not measured right.
    """
    spent = sum(record.end_s for record in outcome.records)
    counted = outcome.in_system * outcome.seconds
    if abs(counted - spent) > DRIFT_S * (len(outcome.records) + spent):
        raise Internal(f"requests spent {spent} s in the system, but {counted} s were counted")


@contextmanager
def _few_collections() -> Iterator[None]:
    """Look for reference cycles seldom: requests leave few, and looking takes a sixth of a run."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Make all that draws from the module `random` reproducible: pauses, and users' strategies."""
    before = random.getstate()
    random.seed(f"experiment {seed}")
    try:
        yield
    finally:
        random.setstate(before)
