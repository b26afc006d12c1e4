"""Generate the page that lists the users of each standard op from the sources.

A layer, an attention backend, a scheme, a model or the adapter for transformers uses an op if the
module names the op object. So does a marker of a sampling parameter that names its op as a string.
Kernels name their op as a string as well, which does not count; neither do the definition and the
cases of the op.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from interposer.records import OpEntry
from interposer_ops.plugin import interposer_records

ROOT = Path(__file__).parents[1]
SOURCES = (
    "ops",
    "quantization",
    "models",
    "models/adapt",
    "models/engine",
    "platforms/cpu",
    "platforms/cuda",
    "platforms/rocm",
    "platforms/xpu",
    "plugins/gguf",
    "plugins/nf4",
)
# Markers of ``SamplingParams`` whose argument is the name of an op.
MARKERS = ("Draw", "LogitEdit")
HEAD = """# Ops in use

This table shows which modules use each standard [op](ops.md): layers, attention backends, schemes,
models and the adapter for transformers. If you write a kernel for an op, every model with one of
these parts can use your kernel.

"""


def uses() -> dict[str, set[str]]:
    """Return the modules that use each op, by op name; the set of an unused op is empty."""
    found: dict[str, set[str]] = {
        record.name: set() for record in interposer_records() if isinstance(record, OpEntry)
    }
    for source in SOURCES:
        folder = ROOT / source / "src"
        for file in sorted(folder.rglob("*.py")):
            if file.name != "__init__.py" and not file.stem.endswith("_cases"):
                module = ".".join(file.relative_to(folder).with_suffix("").parts)
                for name in _named(ast.parse(file.read_text(encoding="utf-8"))):
                    if name in found:
                        found[name].add(module)
    return found


def _named(tree: ast.Module) -> Iterator[str]:
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("interposer_ops")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in imported:
            yield imported[node.id]
        match node:
            case ast.Call(func=ast.Name(id=marker), args=[ast.Constant(value=str(op))]):
                if marker in MARKERS:
                    yield op


def page(found: dict[str, set[str]]) -> str:
    """Format the page."""
    by_modules: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, modules in sorted(found.items()):
        by_modules[tuple(sorted(modules))].append(f"`{name}`")
    rows = [
        f"| {', '.join(names)} | {', '.join(f'`{module}`' for module in modules)} |"
        for modules, names in sorted(by_modules.items(), key=lambda row: row[1])
        if modules
    ]
    return HEAD + "\n".join(("| ops | used by |", "|---|---|", *rows, ""))


def faults(found: dict[str, set[str]]) -> list[str]:
    """Return one message per op that no module uses."""
    return [
        f"{name} is bound by nothing: bind it, or delete it"
        for name, modules in sorted(found.items())
        if not modules
    ]
