"""`microserve simulate`: strategies in virtual time, to choose one before it serves anybody."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from engine.protocol import BadRequest, EngineConfig, MicroserveError
from router.base import table_console
from router.cli.options import GroupedCommand, Number, config_options, given, option, read_params
from router.cli.preflight import Mistake, check_folder
from router.cli.progress import Bar, progress
from router.cli.workload_options import POSITIVE, config_of, goodput_options, workload_options
from router.rollout import Catalog
from router.simulation import (
    ENGINE_FLAGS,
    TARGET,
    Death,
    Experiment,
    Run,
    Timeline,
    best_run,
    check_plot,
    plot,
    read_fleet,
    run_experiment,
    show_engines,
    show_runs,
    summarize,
    sustained,
)
from router.strategy import Bound
from router.telemetry import Slo
from router.workload import WorkloadConfig, open_workload

__all__ = ["simulate"]

LOOK_EVERY = 64  # requests between two looks at the real clock
ENGINES_SHOWN = 16  # in the table of one run
NO_SETTINGS = ("strategies", "compared", "params", "picture", "timeline")  # shown elsewhere
COUNT = click.IntRange(1)


class Rates(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions of click
    """Requests per second, several with commas."""

    name = "rates"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        rates = [POSITIVE.convert(part, param, ctx) for part in str(value).split(",")]
        return tuple(dict.fromkeys(map(float, rates)))


@click.command(cls=GroupedCommand)
@click.argument("strategies", nargs=-1, required=True, metavar="STRATEGY|FILE.py")
@option("--compare", "compared", multiple=True, metavar="A B…", group="Strategy",
        help="other strategies, under the same requests; parameters as NAME:K=V,K=V")  # fmt: skip
@option("--param", "params", multiple=True, metavar="K=V", group="Strategy",
        help="parameter of STRATEGY; repeatable")  # fmt: skip
@option("--fleet", required=True, metavar="NxMODEL@DEVICE,…", group="Fleet",
        help="engines by their profiles, or paths of .json profiles")  # fmt: skip
@option("--prefill", type=click.IntRange(0), default=0, group="Fleet",
        help="how many of them, the first ones, prefill")  # fmt: skip
@option("--decode", type=click.IntRange(0), default=0, group="Fleet",
        help="how many of them, the next ones, decode")  # fmt: skip
@option("--kill", "deaths", multiple=True, metavar="ENGINE@SECONDS", group="Fleet",
        help="kill an engine at a time; repeatable")  # fmt: skip
@option("--call-ms", type=Number(float, 0.0, 1e6), default=1.0, show_default=True, group="Fleet",
        help="round trip of a call between router and engine (ms)")  # fmt: skip
@workload_options()
@option("--rate", "rates", type=Rates(), metavar="R,R…", group="Arrivals",
        help="requests per second, each a run of its own; a trace has its own times")  # fmt: skip
@option("--seeds", type=COUNT, default=1, show_default=True, group="Arrivals",
        help="number of runs with seeds from --seed on, to show the spread")  # fmt: skip
@goodput_options(
    "whether a request must meet both, or each is counted by itself",
    least=0.0,
    target=TARGET,
    required=False,
)
@option("--plot", "picture", type=click.Path(dir_okay=False, path_type=Path), group="Output",
        help="picture of the times over the rates; needs the extra plot")  # fmt: skip
@option("--trace", "timeline", type=click.Path(dir_okay=False, path_type=Path), group="Output",
        help="time line of a single run, for Perfetto")  # fmt: skip
@config_options(EngineConfig, only=ENGINE_FLAGS)
def simulate(**options: Any) -> None:
    """Run strategies in virtual time.

    STRATEGY, unchanged, makes its calls to engines with the real scheduler and page bookkeeping,
    whose steps take the time of a latency profile. Prints tables, and one JSON document as the last
    line of standard output. The same seed gives the same result.
    """
    logging.disable(logging.WARNING)  # of engines that are killed on purpose
    try:
        runs = _Simulation(options).run()
    except MicroserveError as error:
        raise Mistake(error.message) from None
    finally:
        logging.disable(logging.NOTSET)
    click.echo(json.dumps(runs))


class _Simulation:
    """What the command line asks for. Raises `BadRequest` for what cannot be run."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        first, *more = options["strategies"]
        self._strategies = _load([first, *options["compared"], *more], options["params"])
        self._fleet = read_fleet(
            options["fleet"],
            prefill=options["prefill"],
            decode=options["decode"],
            flags=given(EngineConfig, {name: options[name] for name in ENGINE_FLAGS}),
        )
        self._deaths = tuple(map(_death, options["deaths"]))
        self._rates: tuple[float | None, ...] = options["rates"] or (None,)
        self._seeds = range(options["seed"], options["seed"] + options["seeds"])
        self._slo = Slo(options["slo_ttft_ms"], options["slo_tpot_ms"])
        if options["slo_scale"] != 1 and self._slo == Slo():
            raise BadRequest("--slo-scale needs --slo-ttft-ms or --slo-tpot-ms")
        self._slo = self._slo.scaled(options["slo_scale"])
        self._count = self._check_workload()
        self._runs = len(self._strategies) * len(self._rates) * len(self._seeds)
        self._timeline: Path | None = options["timeline"]
        if self._timeline is not None:
            check_folder("--trace", self._timeline)
            if self._runs > 1:
                raise BadRequest(
                    "--trace shows a single run: give one strategy, one rate and one seed"
                )
        if options["picture"] is not None:
            check_folder("--plot", options["picture"])
            check_plot(options["picture"])

    def run(self) -> dict[str, Any]:
        """Run everything, print the tables, and return the JSON document."""
        runs = []
        with progress(self._runs * self._count, "requests", look_every=LOOK_EVERY) as bar:
            # Not `product`, which makes a list of the seeds.
            for rate, seed in ((rate, seed) for rate in self._rates for seed in self._seeds):
                for name, bound in self._strategies.items():
                    figures = self._run_one(bound, rate, seed, bar)
                    runs.append(Run(name, bound.shown, rate, seed, figures))
        self._show(runs)
        options = self._options
        if options["picture"] is not None:
            plot(runs, options["picture"])
        return {
            "simulate": list(self._strategies),
            "settings": {
                name: value
                for name, value in options.items()
                if value is not None and name not in NO_SETTINGS
            },
            "runs": [
                {
                    "strategy": run.strategy, "params": run.params, "rate": run.rate,
                    "seed": run.seed, **run.figures,
                }
                for run in runs
            ],
            "best": [
                {"rate": rate, "strategy": best_run([r for r in runs if r.rate == rate], self._slo)}
                for rate in self._rates
            ],
            "goodput": sustained(runs, options["slo_target"]),
        }  # fmt: skip

    def _run_one(self, bound: Bound, rate: float | None, seed: int, bar: Bar) -> dict[str, Any]:
        experiment = Experiment(
            bound, self._fleet, self._workload(rate, seed), self._count, self._deaths,
            self._options["call_ms"] / 1e3,
        )  # fmt: skip
        timeline = Timeline() if self._timeline is not None else None
        outcome = run_experiment(
            experiment,
            progress=bar.step,
            observe=timeline.observe if timeline is not None else None,
            keep_legs=timeline is not None,
        )
        if timeline is not None and self._timeline is not None:
            timeline.add(outcome.records)
            timeline.write(self._timeline)
        return summarize(outcome, self._slo, separate=self._options["slo"] == "separate")

    def _show(self, runs: Sequence[Run]) -> None:
        console = table_console()
        show_runs(runs, self._slo, console)
        if len(runs) == 1 and len(self._fleet) <= ENGINES_SHOWN:
            show_engines(runs[0], console)
        failed = {message for run in runs for message in run.figures["error_messages"]}
        for message in sorted(failed)[:5]:
            click.echo(f"some requests failed: {message}", err=True)
        if self._slo != Slo() and self._rates[0] is not None:
            target = f"{self._options['slo_target']:.0%}"
            for strategy, rate in sustained(runs, self._options["slo_target"]).items():
                most = "no rate" if rate is None else f"{rate:g} requests/s"
                click.echo(f"{strategy}: {target} attained up to {most}")

    def _workload(self, rate: float | None, seed: int) -> WorkloadConfig:
        return config_of({**self._options, "rate": rate, "seed": seed})

    def _check_workload(self) -> int:
        """Return how many requests a run has."""
        config = self._workload(self._rates[0], self._seeds[0])
        workload = open_workload(config)
        if not workload.timed:
            raise BadRequest(f"the workload {config.name} has no times of its own: give --rate")
        count = self._options["requests"] or workload.count or 100
        return count if workload.count is None else min(count, workload.count)


def _load(names: Sequence[str], params: Sequence[str]) -> dict[str, Bound]:
    """Return the strategies by what the user calls them; `params` are those of the first one."""
    catalog, found = Catalog(), {}
    for number, text in enumerate(names):
        name, colon, pairs = text.partition(":")
        own = read_params(pairs.split(",")) if colon else {}
        if number == 0:
            own |= read_params(params)
            own_text = ",".join(f"{key}={value}" for key, value in own.items())
            text = f"{name}:{own_text}" if own else name
        if text in found:
            raise BadRequest(f"the strategy {text} is given twice")
        found[text] = catalog.find(name).bind(own)
    return found


def _death(text: str) -> Death:
    engine, _, seconds = text.rpartition("@")
    try:
        at_s = float(seconds)
    except ValueError:
        at_s = -1.0
    if not engine or not 0 <= at_s < float("inf"):
        raise BadRequest(f"--kill {text}: want ENGINE@SECONDS, such as engine-0@12.5")
    return Death(engine, at_s)
