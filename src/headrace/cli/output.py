"""Tables for people, JSON for programs.

Owns how results are printed. Invariant: on a terminal a table is drawn with rich; into a pipe or file the
same columns go as plain aligned text, one line a row, with nothing that a script would have to strip. Called
by the client commands.
"""

import json
import sys
from collections.abc import Mapping, Sequence


def print_json(value: object) -> None:
    """One JSON document."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    title: str | None = None,
    colours: Mapping[str, str] | None = None,
) -> None:
    """Rows under their headings; on a terminal, cells of certain texts in their colours."""
    texts = [["" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _draw(columns, texts, title, colours or {})
        return
    if title:
        print(title)
    widths = [max([len(head), *(len(row[at]) for row in texts)]) for at, head in enumerate(columns)]
    for row in [[head.upper() for head in columns], *texts]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def _draw(
    columns: Sequence[str], rows: Sequence[Sequence[str]], title: str | None, colours: Mapping[str, str]
) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", header_style="bold", pad_edge=False)
    for at, name in enumerate(columns):
        numeric = all(row[at].replace(".", "", 1).lstrip("-").isdigit() for row in rows if row[at])
        table.add_column(name, justify="right" if rows and numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=colours.get(cell, "")) for cell in row))
    Console().print(table)
