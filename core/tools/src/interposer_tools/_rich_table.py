"""Tables on a terminal, by rich."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def table(title: str, titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Create a table of plain text: brackets in cells are not read as rich markup."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(title=Text(title), title_justify="left", show_lines=True)
    for heading in titles:
        grid.add_column(heading, overflow="fold")  # a name that is cut off cannot be copied
    for cells in rows:
        grid.add_row(*map(Text, cells))
    return grid
