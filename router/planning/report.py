"""Tables of plans, and the commands that realise them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from rich.console import Console

from router.base import print_table, table_of
from router.planning.instances import Division, Instance
from router.planning.placement import Choice, Rated

__all__ = [
    "fleet_of",
    "placeholder",
    "show_choice",
    "together_command",
    "up_command",
    "why_not",
]

UNDIVIDED = Division(1, 1)
SHOWN = 8  # candidates of a table


def show_choice(title: str, choice: Choice, console: Console) -> None:
    """Print the best candidates, and why all but the chosen one lost.

    The chosen one serves the rate on the fewest GPUs. Says so if the papers' algorithms, which look
    at goodput per GPU alone, take another.
    """
    rate, chosen, best = choice.rate, choice.fewest, choice.best
    table = table_of(
        "", "", ">GPUs", ">goodput/s", ">per GPU", f">GPUs for\n{rate:g}/s", "why not",
        title=title, folded=(1, 6),
    )  # fmt: skip
    ranked = [chosen, *(rated for rated in choice.ranked if rated is not chosen)]
    for rated in ranked[:SHOWN]:
        table.add_row(
            "★" if rated is chosen else "", str(rated.candidate), str(rated.candidate.gpus),
            f"{rated.goodput:.3g}", f"{rated.per_gpu:.3g}",
            str(rated.gpus(rate)) if rated.goodput else "–",
            "" if rated is chosen else why_not(rated, chosen, rate),
        )  # fmt: skip
    print_table(table, console)
    if (more := len(ranked) - SHOWN) > 0:
        console.print(f"and {more} more, with less", highlight=False)
    if best is not chosen:
        console.print(
            f"Goodput per GPU alone, as in DistServe, would take {best.instances(rate)} x "
            f"{best.candidate}: {best.gpus(rate)} GPUs, where {chosen.gpus(rate)} suffice for "
            f"{rate:g} requests/s.", highlight=False,
        )  # fmt: skip
    console.print()


def why_not(rated: Rated, chosen: Rated, rate: float) -> str:
    """Return why a candidate lost to the chosen one."""
    if rated.goodput <= 0:
        return "misses the objectives even without load"
    if (more := rated.gpus(rate) - chosen.gpus(rate)) > 0:
        return f"needs {more} GPU{'s' if more > 1 else ''} more"
    if rated.per_gpu == chosen.per_gpu:
        return "as good per GPU, with more GPUs"
    return f"{1 - rated.per_gpu / chosen.per_gpu:.0%} less per GPU"


def placeholder(model: str) -> str:
    """Return what stands for a model that is known by a profile only."""
    return f"<folder or hub id of {model}>"


def up_command(
    model: str,
    prefills: int,
    decodes: int,
    prefill: Division = UNDIVIDED,
    decode: Division = UNDIVIDED,
) -> str:
    """Return the command that starts so many engines for each phase, and routes between them.

    The engines of a phase have as many workers as its division has GPUs.
    """
    arguments = ["microserve", "up", model, "--prefill", str(prefills), "--decode", str(decodes)]
    for phase, division in (("prefill", prefill), ("decode", decode)):
        split = (("tp", division.tp), ("pp", division.pp))
        if flags := " ".join(f"--{name} {count}" for name, count in split if count > 1):
            arguments += [f"--{phase}-flags", flags]
    return shlex.join([*arguments, "--strategy", "prefill_decode"])


def together_command(model: str, count: int, division: Division) -> str:
    """Return the command that starts so many engines that each serve whole requests."""
    arguments = ["microserve", "up", model, "--engines", str(count)]
    for name, workers in (("tp", division.tp), ("pp", division.pp)):
        if workers > 1:
            arguments += [f"--{name}", str(workers)]
    return shlex.join([*arguments, "--strategy", "data_parallel"])


def fleet_of(instances: Sequence[tuple[int, Instance]]) -> str | None:
    """Return the instances as a fleet for `microserve simulate`; `None` if one has stages."""
    if any(instance.division.pp > 1 for _, instance in instances):
        return None
    return ",".join(f"{count}x{instance.profile}" for count, instance in instances)
