"""The subcommand ``interposer ops``, which lists the ops."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from interposer_tools.options import AsJson


def ops(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="OP", help="Ops to list. A single op is shown in full."),
    ] = None,
    provider: Annotated[
        str | None,
        typer.Option("--from", metavar="DIST", help="List only ops of this distribution."),
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write a Markdown page.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the ops, with a description and the number of test cases for kernels."""
    from interposer import current_registry
    from interposer.errors import UnknownNameError
    from interposer.tooling import write_text
    from interposer_tools._op_catalogue import OpCatalogue

    catalogue = OpCatalogue.of(current_registry(), names or ())
    if provider is not None:
        chosen = tuple(op for op in catalogue.ops if op.provider == provider)
        if not chosen:
            providers = sorted({op.provider for op in catalogue.ops})
            raise UnknownNameError("distribution with ops", provider, providers)
        catalogue = OpCatalogue(chosen)
    if markdown is not None:
        write_text(markdown, catalogue.to_markdown())
    else:
        print(catalogue.to_json() if as_json else catalogue)
