"""Tables for people: on a terminal as wide as that, elsewhere as wide as their content.

Functions import rich when they are called: processes that print no table start faster.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Column, Table

__all__ = ["fits", "print_table", "table_console", "table_of"]

UNLIMITED = 10_000  # characters: wider than any table
LEAST = 14  # characters that a folded column keeps


def table_console() -> Console:
    """Return the console for tables on standard output.

    `COLUMNS` decides its width, then the terminal. Output into a file or a pipe has no limit.
    """
    from rich.console import Console

    asked = os.environ.get("COLUMNS", "")
    if asked.isascii() and asked.isdigit() and int(asked):
        return Console(width=min(int(asked), UNLIMITED))
    return Console(width=None if sys.stdout.isatty() else UNLIMITED)


def table_of(*columns: str, title: str = "", folded: tuple[int, ...] = (0,)) -> Table:
    """Return an empty table; a column whose name begins with `>` is aligned to the right.

    Only the columns of the numbers in `folded` may be divided into lines by `print_table`.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
        title=title or None, title_justify="left", title_style="bold",
    )  # fmt: skip
    for number, name in enumerate(columns):
        table.add_column(
            name.removeprefix(">"),
            justify="right" if name.startswith(">") else "left",
            overflow="fold",
            no_wrap=number not in folded,
        )
    return table


def fits(table: Table, console: Console) -> bool:
    """Return whether the console is wide enough for all columns without folding."""
    return _width(table, console) <= console.width


def print_table(table: Table, console: Console) -> None:
    """Print a table without cutting anything.

    Where the console is too narrow, the widest foldable columns become narrower. Where that does
    not suffice, the lines are longer than the console is wide.
    """
    foldable = {id(column): _content(column) for column in table.columns if not column.no_wrap}
    for _ in range(max(0, _width(table, console) - console.width)):
        wide = [key for key, width in foldable.items() if width > LEAST]
        if not wide:
            break
        foldable[max(wide, key=foldable.__getitem__)] -= 1
    for column in table.columns:
        if id(column) in foldable:
            column.width = foldable[id(column)]
    width, console.width = console.width, max(console.width, _width(table, console))
    try:
        console.print(table, crop=False)
    finally:
        console.width = width


def _width(table: Table, console: Console) -> int:
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(width=UNLIMITED), table).maximum


def _content(column: Column) -> int:
    """Return the longest line of a column."""
    from rich.text import Text

    cells = [column.header, *column.cells]
    texts = [cell if isinstance(cell, Text) else Text.from_markup(str(cell)) for cell in cells]
    return max(line.cell_len for text in texts for line in text.split("\n", allow_blank=True))
