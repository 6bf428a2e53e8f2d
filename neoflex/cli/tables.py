"""Tables for terminals of any width."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from neoflex.cli.output import out

_ANY_WIDTH = 10_000


class Fitting:
    """A table as it is, or, where a line of it is longer than the console's, its rows one below the other: the first
    cell, and under it each other one beside its column's title.
    """

    def __init__(self, table: Table) -> None:
        """Of texts alone."""
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widest = options.update(width=_ANY_WIDTH, max_width=_ANY_WIDTH)
        if Measurement.get(console, widest, self._table).maximum <= options.max_width:
            yield self._table
        else:
            yield from self._below()

    def _below(self) -> Iterator[Text]:
        if self._table.title:
            yield Text.from_markup(str(self._table.title))
        first, *others = self._table.columns
        width = max(len(str(column.header)) for column in others)
        rows = zip(first.cells, *(column.cells for column in others), strict=True)
        for name, *cells in rows:
            yield Text.from_markup(f"{first.header} [bold]{name}[/]")
            for column, cell in zip(others, cells, strict=True):
                yield Text.from_markup(f"  [dim]{column.header!s:<{width}}[/]  {cell}")


def print_table(table: Table) -> None:
    """On standard output. What is too long for any form is broken by the terminal, and copied from there as it was."""
    out.print(Fitting(table), soft_wrap=True)
