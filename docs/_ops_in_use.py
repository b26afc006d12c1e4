"""The page of what binds each standard op, made of the sources.

An op is in use where a layer, an attention backend, a scheme, a model or the bridge to transformers
names the op itself: kernels name it as a text, and its definition and cases are not a use.
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
    "platforms/cpu",
    "platforms/cuda",
    "platforms/rocm",
    "platforms/xpu",
    "plugins/gguf",
    "plugins/nf4",
)
HEAD = """# Ops in use

What binds each standard op: a layer, an attention backend, a scheme, a model or the bridge to
transformers. A kernel for such an op is reached by every model that has the part. [Ops](ops.md)
defines them.

"""


def uses() -> dict[str, set[str]]:
    """Return the modules that name each op, by the op's name; those of no use are empty."""
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


def page(found: dict[str, set[str]]) -> str:
    """Return the page's text."""
    by_modules: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, modules in sorted(found.items()):
        by_modules[tuple(sorted(modules))].append(f"`{name}`")
    rows = [
        f"| {', '.join(names)} | {', '.join(f'`{module}`' for module in modules)} |"
        for modules, names in sorted(by_modules.items(), key=lambda row: row[1])
        if modules
    ]
    return HEAD + "\n".join(("| ops | bound by |", "|---|---|", *rows, ""))


def faults(found: dict[str, set[str]]) -> list[str]:
    """Return what is to be done about the ops that nothing binds."""
    return [
        f"{name} is bound by nothing: bind it, or delete it"
        for name, modules in sorted(found.items())
        if not modules
    ]
