"""`microserve plan placement`: prefill and decode instances by DistServe's algorithms."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from functools import cache
from typing import Any

import click

from engine.latency import find_profile
from engine.protocol import BadRequest, EngineConfig, MicroserveError
from router.base import table_console
from router.cli.options import GroupedCommand, config_options, option
from router.cli.preflight import Mistake
from router.cli.progress import Bar, progress
from router.cli.workload_options import POSITIVE, config_of, goodput_options, workload_options
from router.planning import (
    Attained,
    Choice,
    Division,
    Evaluator,
    Instance,
    Pair,
    Placement,
    fitting_instances,
    fleet_of,
    high_affinity,
    low_affinity,
    measured_model,
    most_rate,
    node_pairs,
    placeholder,
    profile_instances,
    sample_requests,
    show_choice,
    up_command,
)
from router.simulation import TARGET
from router.telemetry import Slo

__all__ = ["COUNT", "REPLACE", "WORKERS", "placement", "report"]

COUNT = click.IntRange(1, 4096)
WORKERS = "the workers of an engine are processes of one host, and compute on its CPUs so far"
REQUESTS = 500
REPLACE = (
    "replace <…> by a model that engines can load: a folder, a .gguf file or a hub id of the "
    "architectures Llama, Mistral, Qwen2 and Qwen3"
)
# Options that `microserve simulate` has too, passed on if they are not the defaults.
PASSED_ON = (
    "workload", "input", "output", "scale", "requests", "seed", "arrivals", "cv", "slo",
    "slo-scale", "slo-target", "token-budget", "max-batch",
)  # fmt: skip
DEFAULTS = {
    "scale": 1.0, "seed": 0, "arrivals": "poisson", "cv": 1.0, "slo": "joint", "slo-scale": 1.0,
    "slo-target": TARGET, "token-budget": EngineConfig().token_budget,
    "max-batch": EngineConfig().max_batch,
}  # fmt: skip


@click.command(cls=GroupedCommand)
@click.argument("model", metavar="MODEL@DEVICE|FILE.json")
@option("--nodes", type=COUNT, default=1, show_default=True, group="Cluster",
        help="number of nodes")  # fmt: skip
@option("--gpus-per-node", type=COUNT, default=8, show_default=True, group="Cluster",
        help="GPUs of each node")  # fmt: skip
@option("--affinity", type=click.Choice(["high", "low"]), default="low", show_default=True,
        group="Cluster", help="high: KV moves between any nodes; low: only within one")  # fmt: skip
@option("--link-gbps", type=POSITIVE, group="Cluster",
        help="bandwidth for KV between instances (Gbit/s)  [default: the profile's]")  # fmt: skip
@workload_options()
@option("--rate", type=POSITIVE, required=True, group="Arrivals",
        help="requests per second that the placement shall serve")  # fmt: skip
@goodput_options(
    "low affinity: whether a request must meet both, or each by itself",
    least=0.01,
    target=TARGET,
    required=True,
)
@config_options(EngineConfig, only=("token_budget", "max_batch"))
def placement(**options: Any) -> None:
    """Place prefill and decode instances by DistServe's algorithms.

    Prints the candidates by goodput per GPU, the placement and the commands that realise it, and
    one JSON document as the last line of standard output.
    """
    report(lambda: _Placing(options).run())


def report(run: Callable[[], dict[str, Any]]) -> None:
    try:
        document = run()
    except MicroserveError as error:
        raise Mistake(error.message) from None
    click.echo(json.dumps(document))


class _Placing:
    """What the command line asks for. Raises `BadRequest` for what cannot be placed."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options
        self._nodes, self._per_node = options["nodes"], options["gpus_per_node"]
        self._rate, self._target = options["rate"], options["slo_target"]
        slo = Slo(options["slo_ttft_ms"], options["slo_tpot_ms"]).scaled(options["slo_scale"])
        sample = sample_requests(config_of(options), options["requests"] or REQUESTS)
        size = {"nodes": self._nodes, "gpus_per_node": self._per_node, "longest": sample.longest}
        self._model: str = options["model"]
        if self._model.endswith(".json"):
            profile = find_profile(self._model)
            self._instances = profile_instances(profile, **size)
            self._served, put = profile.model, profile.put
            layers, kv_bytes = profile.layers, profile.kv_bytes_per_token
        else:
            name, _, device = self._model.partition("@")
            self._served = placeholder(name)
            measured = measured_model(name, device)
            self._instances = fitting_instances(measured, **size)
            layers, kv_bytes = measured.shape.layers, measured.shape.kv_bytes_per_token
            put = measured.put
        gbps: float | None = options["link_gbps"]

        def kv_s(tokens: int) -> float:
            if gbps is not None:
                return tokens * kv_bytes * 8 / (gbps * 1e9)
            return put.seconds(tokens * kv_bytes, layers)

        self._evaluator = Evaluator(
            sample, slo, self._target, options["slo"] == "separate",
            max_tokens=options["token_budget"], max_batch=options["max_batch"], kv_s=kv_s,
        )  # fmt: skip

    def run(self) -> dict[str, Any]:
        """Plan, print the tables, and return the JSON document."""
        high = self._options["affinity"] == "high"
        placed = self._high() if high else self._low()
        available = self._nodes * self._per_node
        if placed.gpus > available:
            raise BadRequest(
                f"GPUs: {self._rate:g} requests/s need {placed.gpus} GPUs, and there are "
                f"{available}, which serve up to {most_rate(placed, available):.3g} requests/s"
            )
        console = table_console()
        if isinstance(placed, Placement):
            show_choice("prefill alone", placed.prefill, console)
            show_choice("decode alone", placed.decode, console)
        else:
            show_choice("prefill and decode together", placed, console)
        prefill, decode, (prefills, decodes) = self._chosen(placed)
        attained = self._evaluator.attained([prefill] * prefills, [decode] * decodes, self._rate)
        click.echo(
            f"{prefills} prefill x {prefill.division}, {decodes} decode x {decode.division}: "
            f"{placed.gpus} GPUs for {self._rate:g} requests/s, at which {_percent(attained)}"
        )
        commands = self._commands(prefill, decode, prefills, decodes)
        return {
            "plan": "placement",
            "model": self._model,
            "affinity": self._options["affinity"],
            "rate": self._rate,
            "gpus": placed.gpus,
            "prefill": {"instances": prefills, **_division(prefill.division)},
            "decode": {"instances": decodes, **_division(decode.division)},
            "attained": {"ttft": attained.ttft, "tpot": attained.tpot, "both": attained.both},
            "candidates": _candidates(placed),
            "strategy": {"name": "prefill_decode", "params": {}},
            "commands": commands,
        }

    def _high(self) -> Placement:
        with progress(2 * len(self._instances), "candidates") as bar:
            return high_affinity(
                self._instances,
                _counted(bar, lambda one: self._evaluator.prefill(self._instances[one])),
                _counted(bar, lambda one: self._evaluator.decode(self._instances[one])),
                self._rate,
            )

    def _low(self) -> Choice:
        pairs = node_pairs(self._instances, nodes=self._nodes, gpus_per_node=self._per_node)

        # Pairs that differ in their segments alone are the same two instances.
        @cache
        def goodput(prefill: Division, decode: Division) -> float:
            return self._evaluator.joint(self._instances[prefill], self._instances[decode])

        def joint(pair: Pair) -> float:
            return goodput(pair.whole_prefill, pair.whole_decode)

        with progress(len(pairs), "candidates") as bar:
            return low_affinity(pairs, _counted(bar, joint), self._rate)

    def _chosen(self, placed: Placement | Choice) -> tuple[Instance, Instance, tuple[int, int]]:
        if isinstance(placed, Placement):
            prefill = placed.prefill.fewest.candidate.whole_prefill
            decode = placed.decode.fewest.candidate.whole_decode
            counts = placed.prefill.count, placed.decode.count
        else:
            pair, counts = placed.fewest.candidate, (placed.count, placed.count)
            prefill, decode = pair.whole_prefill, pair.whole_decode
        return self._instances[prefill], self._instances[decode], counts

    def _commands(
        self, prefill: Instance, decode: Instance, prefills: int, decodes: int
    ) -> list[str]:
        commands = [up_command(self._served, prefills, decodes, prefill.division, decode.division)]
        click.echo(f"\n  {commands[0]}")
        if self._served.startswith("<"):
            click.echo(f"  ({REPLACE})")
        if max(prefill.division.gpus, decode.division.gpus) > 1:
            click.echo(f"  ({WORKERS})")
        fleet = fleet_of([(prefills, prefill), (decodes, decode)])
        if fleet is not None:
            commands.append(self._simulate(fleet, prefills, decodes))
            click.echo(f"  {commands[1]}")
        return commands

    def _simulate(self, fleet: str, prefills: int, decodes: int) -> str:
        """Return the command that runs the placement on virtual engines, with the same requests."""
        options = self._options
        flags = {
            "fleet": fleet, "prefill": prefills, "decode": decodes, "rate": f"{self._rate:g}",
            "slo-ttft-ms": f"{options['slo_ttft_ms']:g}",
            "slo-tpot-ms": f"{options['slo_tpot_ms']:g}",
        }  # fmt: skip
        for name in PASSED_ON:
            value = options["input_" if name == "input" else name.replace("-", "_")]
            if value is not None and (name == "workload" or value != DEFAULTS.get(name)):
                flags[name] = value
        return shlex.join(
            ["microserve", "simulate", "prefill_decode"]
            + [text for name, value in flags.items() for text in (f"--{name}", str(value))]
        )


def _counted(bar: Bar, goodput: Callable[[Any], float]) -> Callable[[Any], float]:
    def counted(candidate: Any) -> float:
        found: float = goodput(candidate)
        bar.step()
        return found

    return counted


def _percent(attained: Attained) -> str:
    return f"{attained.ttft:.1%} meet TTFT, {attained.tpot:.1%} TPOT, {attained.both:.1%} both"


def _division(division: Division) -> dict[str, int]:
    return {"tp": division.tp, "pp": division.pp}


def _candidates(placed: Placement | Choice) -> dict[str, Any]:
    if isinstance(placed, Choice):
        return {"joint": _ranked(placed)}
    return {"prefill": _ranked(placed.prefill), "decode": _ranked(placed.decode)}


def _ranked(choice: Choice) -> list[dict[str, Any]]:
    return [
        {
            "candidate": str(rated.candidate), "gpus": rated.candidate.gpus,
            "goodput": rated.goodput, "per_gpu": rated.per_gpu,
        }
        for rated in choice.ranked
    ]  # fmt: skip
