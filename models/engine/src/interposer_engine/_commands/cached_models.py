"""The subcommands ``interposer list``, ``pull`` and ``remove``, for models of the hub's cache.

Heavy modules are imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from interposer_tools.options import AsJson

if TYPE_CHECKING:
    from interposer_engine._checkpoint.hub_cache import CachedModel

_Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A name on the hub, such as Qwen/Qwen3-0.6B or Qwen/Qwen3-0.6B@main."
    ),
]


def list_models(as_json: AsJson = False) -> None:
    """List the downloaded models, and whether interposer can load them."""
    from interposer import current_registry
    from interposer_engine._checkpoint.hub_cache import cached_models

    models = cached_models(current_registry().subjects("model"))
    if as_json:
        print(json.dumps({"version": 1, "models": [_facts(model) for model in models]}, indent=2))
        return
    if not models:
        print("No model is in the cache. Try: interposer pull Qwen/Qwen3-0.6B")
        return
    rows = [("name", "revision", "size", "last used", "loads"), *map(_cells, models)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def pull(name: _Name) -> None:
    """Download a model into the cache of huggingface_hub: only the files that loading needs."""
    from interposer_engine._checkpoint.hub_cache import pull as download

    folder = download(name)
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{name}: {_size(num_bytes)} in {folder}")


def remove(
    name: _Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
) -> None:
    """Remove a downloaded model from the cache; NAME@REVISION removes only that revision."""
    from interposer_engine._checkpoint.hub_cache import removal

    removed = removal(name)
    for model in removed.models:
        print(f"{model.name}, revision {model.revision}: {_size(model.num_bytes)}")
    size = _size(removed.freed_bytes)
    if not yes:
        typer.confirm(f"Remove this and free {size}?", abort=True)
    removed.execute()
    print(f"{size} freed")


def _cells(model: CachedModel) -> tuple[str, ...]:
    date = datetime.fromtimestamp(model.last_used).strftime("%Y-%m-%d")
    loads = "yes" if model.loads else f"no: {model.loads.reason}"
    return model.name, model.revision, _size(model.num_bytes), date, loads


def _facts(model: CachedModel) -> dict[str, object]:
    return {
        "name": model.name,
        "commit": model.commit,
        "refs": [*model.refs],
        "path": str(model.path),
        "bytes": model.num_bytes,
        "last_used": model.last_used,
        "loads": model.loads.accepted,
        "reason": model.loads.reason,
    }


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
