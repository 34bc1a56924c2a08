"""`microserve plan pipeline`: machines for prompts and for tokens, by DéjàVu's planner."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import click
from rich.console import Console

from engine.latency import DEVICES, MODELS, StepWork, find_profile
from engine.protocol import BadRequest
from router.base import print_table, table_console, table_of
from router.cli.options import GroupedCommand, Number, option
from router.cli.plan.placement import COUNT, REPLACE, WORKERS, report
from router.cli.workload_options import POSITIVE
from router.planning import (
    Division,
    Job,
    Microbatch,
    Served,
    Split,
    balanced_split,
    colocated,
    colocated_s,
    data_parallel,
    disaggregated,
    disaggregation_wins,
    least_machines,
    placeholder,
    plan_split,
    swapping_helps,
    together_command,
    up_command,
)
from router.workload import lognormal

__all__ = ["pipeline"]

USABLE = 0.93  # of a GPU's memory, as in the model of pools
SHOWN = 8


@click.command(cls=GroupedCommand)
@click.argument("model", metavar="MODEL@DEVICE")
@option("--machines", type=click.IntRange(2, 1024), required=True, group="Cluster",
        help="number of machines, each a stage of a pipeline")  # fmt: skip
@option("--gpus-per-machine", type=COUNT, default=1, show_default=True, group="Cluster",
        help="GPUs of a machine, which divide each layer")  # fmt: skip
@option("--gbps", type=POSITIVE, default=40.0, show_default=True, group="Cluster",
        help="bandwidth between machines (Gbit/s)")  # fmt: skip
@option("--host-gb-s", type=POSITIVE, default=25.0, show_default=True, group="Cluster",
        help="bandwidth between GPU and host memory, for swapping (GB/s)")  # fmt: skip
@option("--price", type=POSITIVE, default=1.0, show_default=True, group="Cluster",
        help="price of a machine and hour")  # fmt: skip
@option("--batch", type=COUNT, default=8, show_default=True, group="Work",
        help="requests of a microbatch")  # fmt: skip
@option("--prompt", type=click.IntRange(1, 10**6), default=1000, show_default=True, group="Work",
        help="prompt tokens of a request")  # fmt: skip
@option("--tokens", type=click.IntRange(1, 10**5), default=115, show_default=True, group="Work",
        help="new tokens of a request, on average")  # fmt: skip
@option("--early-stops", type=Number(float, 0.0, 3.0), default=1.0, show_default=True,
        group="Work", help="deviation of the logarithm of microbatches' new tokens",
)  # fmt: skip
@option("--microbatches", type=click.IntRange(1, 10**5), default=100, show_default=True,
        group="Work", help="microbatches of the simulated makespan")  # fmt: skip
@option("--seed", type=int, default=0, show_default=True, group="Work",
        help="seed of the new tokens")  # fmt: skip
@option("--prompt-s", type=POSITIVE, group="Work",
        help="a microbatch's prompts on one machine (s)  [default: the profile's]")  # fmt: skip
@option("--token-s", type=POSITIVE, group="Work",
        help="a microbatch's tokens of a step, likewise (s)  [default: the profile's]")  # fmt: skip
def pipeline(**options: Any) -> None:
    """Split machines between prompts and tokens by DéjàVu's planner.

    Prints the splits that fit in memory by their time per microbatch, simulated makespans against
    pipelines that do both, and one JSON document as the last line of standard output.
    """

    def run() -> dict[str, Any]:
        planned = _plan(**options)
        _show(planned, table_console())
        return planned.document

    report(run)


class _Run(NamedTuple):
    """A simulated way to use the machines, and the command for it."""

    name: str
    served: Served
    command: str


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan, and its JSON document."""

    splits: list[Split]  # the fastest first
    runs: list[_Run]  # the split first
    price: float
    notes: list[str]
    document: dict[str, Any]


def _plan(
    model: str, *, machines: int, gpus_per_machine: int, gbps: float, host_gb_s: float,
    price: float, batch: int, prompt: int, tokens: int, early_stops: float, microbatches: int,
    seed: int, prompt_s: float | None, token_s: float | None,
) -> _Planned:  # fmt: skip
    """Plan and simulate. Raises `BadRequest` for unknown names, and for what fits nowhere."""
    name, _, device = model.partition("@")
    if name not in MODELS or device not in DEVICES:
        raise BadRequest(
            f"{model!r} is not MODEL@DEVICE with a model of {', '.join(sorted(MODELS))} and a "
            f"device of {', '.join(sorted(DEVICES))}"
        )
    shape = MODELS[name]
    if shape.heads % gpus_per_machine:
        raise BadRequest(
            f"heads: {shape.heads} of them cannot be divided by {gpus_per_machine} GPUs"
        )
    if prompt_s is None or token_s is None:
        suffix = f":tp{gpus_per_machine}" if gpus_per_machine > 1 else ""
        try:
            step = find_profile(model + suffix).step
        except BadRequest:
            raise BadRequest(
                f"no profile is called {model + suffix}, so give --prompt-s and --token-s"
            ) from None
        prompt_s = prompt_s or step.seconds(StepWork(batch * prompt, batch * prompt**2))
        work = StepWork(decodes=batch, context=batch * (prompt + tokens // 2))
        token_s = token_s or step.seconds(work)
    kv = batch * shape.kv_bytes_per_token / shape.layers
    whole = Microbatch(
        shape.layers, shape.layer_bytes, prompt * kv, tokens * kv, prompt_s, token_s, tokens
    )
    memory = gpus_per_machine * (USABLE * DEVICES[device].memory - shape.embedding_bytes)
    splits = plan_split(machines, whole, memory, gbps * 1e9 / 8)
    best = splits[0]
    jobs = _jobs(microbatches, tokens, early_stops, seed)
    runs = _simulate(jobs, machines, whole, memory, best, placeholder(name), gpus_per_machine)
    fastest = min(runs, key=lambda run: run.served.makespan_s)
    gain = runs[0].served.makespan_s / fastest.served.makespan_s - 1
    ideal = balanced_split(machines, prompt_s, token_s, tokens, best.streaming)
    wins = disaggregation_wins(machines, prompt_s, token_s, best.streaming)
    swaps = swapping_helps(
        token_s / best.token, tokens, prompt, batch * shape.kv_bytes_per_token / best.token,
        host_gb_s * 1e9 * gpus_per_machine,
    )  # fmt: skip
    together = colocated_s(machines, whole)
    notes = [
        f"both pipelines are equally fast with {ideal[0]:.2f} and {ideal[1]:.2f} machines",
        f"{best.seconds:.3g} s per microbatch in steady state, against {together:.3g} s in one "
        f"pipeline for both (equation 4); equation 5 says that disaggregation "
        f"{'wins' if wins else 'does not win'} with Y/t = {prompt_s / token_s:.3g}, "
        f"m = {best.streaming:.3g}",
        f"a microbatch twice as large with swapping is {'faster' if swaps else 'not faster'} "
        f"than two without",
        "in the simulation, the split is fastest"
        if fastest is runs[0] else
        f"in the simulation, the split takes {gain:.0%} longer than {fastest.name}",
    ]  # fmt: skip
    document = {
        "plan": "pipeline", "model": model, "machines": machines, "prompt_s": prompt_s,
        "token_s": token_s, "prompt": best.prompt, "token": best.token,
        "streaming": best.streaming, "balanced": ideal, "seconds_per_microbatch": best.seconds,
        "colocated_seconds_per_microbatch": together, "disaggregation_wins": wins,
        "swapping_helps": swaps,
        "splits": [[s.prompt, s.token, s.prompt_s, s.token_s] for s in splits],
        "simulated": [
            {"name": run.name, "makespan_s": run.served.makespan_s,
             "cost": run.served.cost(price), "command": run.command}
            for run in runs
        ],
        "strategy": {"name": "prefill_decode", "params": {}}, "commands": [runs[0].command],
    }  # fmt: skip
    return _Planned(splits, runs, price, notes, document)


def _show(planned: _Planned, console: Console) -> None:
    """Print the splits, the simulated runs and the command."""
    table = table_of(
        ">prompts", ">tokens", ">m", ">prompts s", ">tokens s", "why not",
        title="machines for prompts and for tokens", folded=(5,),
    )  # fmt: skip
    best = planned.splits[0]
    for number, split in enumerate(planned.splits[:SHOWN]):
        slow = "prompts" if split.prompt_s > split.token_s else "tokens"
        lost = f"{split.seconds / best.seconds - 1:.0%} slower, by its {slow}" if number else ""
        table.add_row(
            f"{'' if number else '★ '}{split.prompt}", str(split.token), f"{split.streaming:.3g}",
            f"{split.prompt_s:.3g}", f"{split.token_s:.3g}", lost,
        )  # fmt: skip
    print_table(table, console)
    console.print()
    runs = table_of("", ">makespan s", ">cost", title="simulated, all microbatches at once")
    for name, served, _ in planned.runs:
        runs.add_row(name, f"{served.makespan_s:.4g}", f"{served.cost(planned.price):.3g}")
    print_table(runs, console)
    console.print()
    for note in planned.notes:
        click.echo(note)
    click.echo()
    for name, _, command in planned.runs:
        click.echo(f"  # {name}\n  {command}")
    click.echo(f"  ({REPLACE})\n  ({WORKERS})")


def _jobs(count: int, tokens: int, spread: float, seed: int) -> list[Job]:
    """Return microbatches whose tokens have this mean and are log-normal, up to ten times it."""
    if not spread:
        return [Job(0.0, tokens)] * count
    drawn = list(itertools.islice(lognormal(seed, tokens, spread, 1, 10 * tokens), count))
    scale = tokens * count / sum(drawn)
    return [Job(0.0, max(1, round(each * scale))) for each in drawn]


def _simulate(
    jobs: list[Job], machines: int, batch: Microbatch, memory: float, best: Split, model: str,
    gpus: int,
) -> list[_Run]:  # fmt: skip
    """Simulate the split, one pipeline for both, and the fastest number of several ones."""
    times = batch.prompt_s, batch.token_s
    stages = Division(gpus, best.prompt), Division(gpus, best.token)
    runs = [
        _Run(
            f"{best.prompt} for prompts, {best.token} for tokens",
            disaggregated(jobs, best.prompt, best.token, *times, best.streaming),
            up_command(model, 1, 1, *stages),
        )
    ]
    _, least = least_machines(batch, memory)
    if least is not None and least <= machines:
        runs.append(
            _Run(
                f"one pipeline of {machines} for both",
                colocated(jobs, machines, *times),
                together_command(model, 1, Division(gpus, machines)),
            )
        )
        several = [
            _Run(
                f"{count} pipelines of {machines // count} for both",
                data_parallel(jobs, count, machines // count, *times),
                together_command(model, count, Division(gpus, machines // count)),
            )
            for count in range(2, machines // least + 1)
            if machines % count == 0
        ]
        runs += sorted(several, key=lambda run: run.served.makespan_s)[:1]
    return runs
