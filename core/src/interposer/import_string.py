"""Whether an import string points at something, judged from source files and without importing."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from interposer.errors import nearest_first

__all__ = ["check_import_string"]

# A module that uses one of these may define names that its source does not show.
_DYNAMIC = frozenset(
    {"__getattr__", "__path__", "eval", "exec", "globals", "locals", "setattr", "vars"}
)


def check_import_string(target: str) -> str:
    """Return why ``"package.module:name"`` points nowhere, or an empty string.

    It is empty as well where the source cannot tell: for native modules, those made at run time
    and those that compute their names.
    """
    module, _, attribute = target.partition(":")
    parts = module.split(".")
    spec = _top_level(parts[0])
    if spec is None:
        return "" if parts[0] in sys.modules else f"there is no module {parts[0]!r}"
    for number in range(1, len(parts)):
        name = ".".join(parts[: number + 1])
        if name in sys.modules:
            spec = getattr(sys.modules[name], "__spec__", None)
            if spec is None:
                return ""
            continue
        folders = spec.submodule_search_locations or ()
        found = PathFinder.find_spec(name, list(folders))
        if found is None:
            if _names(spec) is None:  # it may look for its modules elsewhere
                return ""
            known = _submodules(folders)
            return f"there is no module {name!r}{_nearest(parts[number], known)}"
        spec = found
    return _check_attribute(spec, module, attribute)


def _check_attribute(spec: ModuleSpec, module: str, attribute: str) -> str:
    names = _names(spec)
    if names is None:
        return ""
    known = names | set(_submodules(spec.submodule_search_locations or ()))
    if attribute in known or (attribute.startswith("__") and attribute.endswith("__")):
        return ""
    return f"{module} has no {attribute!r}{_nearest(attribute, names)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    nearest = nearest_first(name, known)[:3]
    return f"; nearest: {', '.join(nearest)}" if nearest else ""


def _top_level(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except (ValueError, ImportError):  # made at run time: it has no spec
        return None


def _names(spec: ModuleSpec) -> frozenset[str] | None:
    """Return the names that a module defines, or None if its source does not tell."""
    if spec.origin is None:
        return frozenset() if spec.submodule_search_locations is not None else None
    path = Path(spec.origin)
    if path.suffix != ".py":
        return None
    try:
        facts = path.stat()
    except OSError:
        return None
    return _parsed(path, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=256)
def _parsed(path: Path, _mtime_ns: int, _size: int) -> frozenset[str] | None:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # importing it will say what is wrong
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in _DYNAMIC:
                return None
            case ast.FunctionDef(name="__getattr__") if node in tree.body:
                return None
            case ast.ImportFrom(names=[ast.alias(name="*")]):
                return None
    return frozenset(_bound(tree.body)) | {
        name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names
    }


def _bound(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that statements of a module bind in it."""
    for node in nodes:
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from ((a.asname or a.name).partition(".")[0] for a in aliases)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
                yield from _bound(ast.iter_child_nodes(node))
            case _:
                yield from _bound(ast.iter_child_nodes(node))


def _submodules(folders: Iterable[str]) -> list[str]:
    found = []
    for folder in map(Path, folders):
        if folder.is_dir():
            found += [p.name.partition(".")[0] for p in folder.iterdir() if p.name[0] not in "._"]
    return found
