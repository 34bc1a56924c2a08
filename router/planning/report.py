"""Tables of plans, and the commands that realise them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from router.planning.instances import Instance
from router.planning.placement import Choice, Rated

__all__ = ["fleet_of", "show_choice", "up_command", "why_not"]

SHOWN = 8  # candidates of a table


def show_choice(title: str, choice: Choice, rate: float, console: Console) -> None:
    """Print the best candidates, and why all but the first one lost.

    Says so if others serve the rate on fewer GPUs: the papers' algorithms look at goodput per GPU
    alone, and a last instance may have little to do.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("GPUs", justify="right")
    table.add_column("goodput/s", justify="right")
    table.add_column("per GPU", justify="right")
    table.add_column(f"GPUs for {rate:g}/s", justify="right")
    table.add_column("why not")
    for number, rated in enumerate(choice.ranked[:SHOWN]):
        table.add_row(
            f"{'' if number else '★ '}{rated.candidate}", str(rated.candidate.gpus),
            f"{rated.goodput:.3g}", f"{rated.per_gpu:.3g}",
            str(rated.instances(rate) * rated.candidate.gpus) if rated.goodput else "–",
            why_not(rated, choice.best) if number else "",
        )  # fmt: skip
    if more := len(choice.ranked) - SHOWN:
        table.caption = f"and {more} more, with less" if more > 0 else None
    console.print(table)
    served = [rated for rated in choice.ranked if rated.goodput > 0]
    least = min(served, key=lambda rated: rated.instances(rate) * rated.candidate.gpus)
    if least.instances(rate) * least.candidate.gpus < choice.gpus:
        gpus = least.instances(rate) * least.candidate.gpus
        console.print(
            f"At {rate:g} requests/s, {gpus} GPUs suffice with {least.instances(rate)} x "
            f"{least.candidate}.", highlight=False,
        )  # fmt: skip


def why_not(rated: Rated, best: Rated) -> str:
    """Return why a candidate lost to the best one."""
    if rated.goodput <= 0:
        return "misses the objectives even without load"
    if rated.per_gpu == best.per_gpu:
        return "as good per GPU, with more GPUs"
    return f"{1 - rated.per_gpu / best.per_gpu:.0%} less per GPU"


def up_command(model: str, prefills: int, decodes: int) -> str:
    """Return the command that starts so many engines for each phase, and routes between them."""
    return (
        f"microserve up {model} --prefill {prefills} --decode {decodes} --strategy prefill_decode"
    )


def fleet_of(instances: Sequence[tuple[int, Instance]]) -> str | None:
    """Return the instances as a fleet for `microserve simulate`; `None` if one has stages."""
    if any(instance.division.pp > 1 for _, instance in instances):
        return None
    return ",".join(f"{count}x{instance.profile}" for count, instance in instances)
