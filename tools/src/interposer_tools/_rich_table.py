"""Tables for terminals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table of plain cells, in which no bracket is taken for markup."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title), title_justify="left", show_lines=True)
    for heading in titles:
        made.add_column(heading, overflow="fold")  # half a name is none
    for cells in rows:
        made.add_row(*map(Text, cells))
    return made
