"""Tables for the report of ``interposer doctor`` on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from interposer_tools._doctor.health import Health
from interposer_tools._rich_table import table


def health_tables(health: Health) -> Iterator[Any]:
    """Yield the head, the tables, the warnings and the problems as rich renderables."""
    yield Text("\n".join(health.head))
    for title, titles, rows in health.sections():
        yield table(title, titles, rows)
    for warning in health.warnings:
        yield Text(f"warning: {warning}", style="yellow")
    for block in health.problem_blocks():
        yield Text("\n".join(block), style="" if health.healthy else "red")
