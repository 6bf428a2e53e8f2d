"""Tables where the terminal is wide enough, and where it is not."""

import io

from rich.console import Console
from rich.table import Table

from neoflex.cli.tables import Fitting


def printed(table: Table, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(Fitting(table), soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def table() -> Table:
    made = Table("load", "finished", title="latencies in ms")
    made.add_column("TTFT", justify="right")
    made.add_row("8 concurrent", "64 of 64", "12.5 / 13.75 / 1234")
    made.add_row("16 concurrent", "63 of 64", "-")
    return made


def test_it_stays_a_table_where_it_fits() -> None:
    lines = printed(table(), 80)
    assert "│ 8 concurrent  │ 64 of 64 │ 12.5 / 13.75 / 1234 │" in lines
    assert len(lines[-1]) == 50
    assert printed(table(), 50)[1:] == lines[1:]


def test_each_row_is_a_paragraph_where_it_does_not() -> None:
    assert printed(table(), 49) == [
        "latencies in ms",
        "load 8 concurrent",
        "  finished  64 of 64",
        "  TTFT      12.5 / 13.75 / 1234",
        "load 16 concurrent",
        "  finished  63 of 64",
        "  TTFT      -",
    ]


def test_what_fits_no_form_is_left_whole() -> None:
    long = Table("model", "where")
    long.add_row("x", "/a/very/long/path/to/a/model/that/no/terminal/holds")
    assert printed(long, 20)[-1] == "  where  /a/very/long/path/to/a/model/that/no/terminal/holds"
