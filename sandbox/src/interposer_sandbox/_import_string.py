"""Checks that an import string points at something, made without importing anything."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from interposer_sandbox._foreign import nearest_first

# A module that uses one of these may define names that its source does not show.
_DYNAMIC = frozenset(
    {"__getattr__", "__path__", "eval", "exec", "globals", "locals", "setattr", "vars"}
)
# What the text of a module has somewhere if a statement in it can be dynamic or a global one.
# Letters beyond ASCII may be other ways to write a name.
_TELLING = re.compile(
    rb"\b(?:global|%s)\b|import[\s(\\]*\*|[\x80-\xff]" % "|".join(_DYNAMIC).encode()
)


class _Source(NamedTuple):
    """The names that a source file binds, those apart that it has from imports alone."""

    own: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()
    complete: bool = True


def check_import_string(target: str) -> str:
    """Return why ``"package.module:name"`` points nowhere, or an empty string.

    A module that is imported already is looked into, of another its source is read. The result
    is empty as well where neither can tell: for modules that compute their names, and for native
    ones that are not imported.
    """
    module, _, attribute = target.partition(":")
    loaded = sys.modules.get(module)
    if loaded is not None and not _is_unfinished(loaded):
        return _check_loaded(loaded, module, attribute)
    parts = module.split(".")
    spec = _top_level(parts[0])
    if spec is None:
        return "" if sys.modules.get(parts[0]) is not None else f"there is no module {parts[0]!r}"
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
            source = _source(spec)
            if not (source and source.complete):  # it may look for its modules elsewhere
                return ""
            known = _submodules(folders)
            return f"there is no module {name!r}{_nearest(parts[number], known)}"
        spec = found
    return _check_attribute(spec, module, attribute)


def is_loaded(target: str) -> bool:
    """Say whether the module of an import string is imported and simply holds what it names."""
    module, _, attribute = target.partition(":")
    loaded = sys.modules.get(module)
    return type(loaded) is ModuleType and attribute in vars(loaded)


def _is_unfinished(loaded: object) -> bool:
    """Say whether a module is being imported, so that the rest of it is still to come."""
    return type(loaded) is ModuleType and getattr(
        vars(loaded).get("__spec__"), "_initializing", False
    )


def _check_loaded(loaded: object, module: str, attribute: str) -> str:
    # A class of its own, or __getattr__, may make names when they are asked for; they are not.
    if type(loaded) is not ModuleType:
        return ""
    names = dict(vars(loaded))
    if attribute in names or "__getattr__" in names:
        return ""
    if attribute in _submodules(names.get("__path__", ())):
        return ""
    return f"{module} has no {attribute!r}{_nearest(attribute, _own_names(module, names))}"


def _own_names(module: str, names: dict[str, Any]) -> Iterator[str]:
    """Yield the names in an imported module that are not there by an import alone."""
    source = _read(names.get("__file__"))
    for name, value in names.items():
        hidden = name.startswith("__") or (source is not None and name in source.imported)
        kind = type(value)
        if hidden or issubclass(kind, ModuleType):
            continue
        if not issubclass(kind, FunctionType | type) or value.__module__ == module:
            yield name


def _check_attribute(spec: ModuleSpec, module: str, attribute: str) -> str:
    source = _source(spec)
    if not (source and source.complete):
        return ""
    known = {*source.own, *source.imported, *_submodules(spec.submodule_search_locations or ())}
    if attribute in known or (attribute.startswith("__") and attribute.endswith("__")):
        return ""
    return f"{module} has no {attribute!r}{_nearest(attribute, source.own)}"


def _nearest(name: str, known: Iterable[str]) -> str:
    nearest = nearest_first(name, known)[:3]
    return f"; nearest: {', '.join(nearest)}" if nearest else ""


def _top_level(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except (ValueError, ImportError):  # made at run time: it has no spec
        return None


def _source(spec: ModuleSpec) -> _Source | None:
    """Return what the source of a module binds, or None if there is none to be read."""
    if spec.origin is None:
        return None if spec.submodule_search_locations is None else _Source()
    return _read(spec.origin)


def _read(file: object) -> _Source | None:
    if type(file) is not str or not file.endswith(".py"):
        return None
    path = Path(file)
    try:
        facts = path.stat()
    except (OSError, ValueError):
        return None
    return _parsed(path, facts.st_mtime_ns, facts.st_size)


@lru_cache(maxsize=256)
def _parsed(path: Path, _mtime_ns: int, _size: int) -> _Source | None:
    try:
        text = path.read_bytes()
        tree = ast.parse(text)
        bound = list(_bound(tree.body))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # importing it will say what is wrong
    nodes = list(ast.walk(tree)) if _TELLING.search(text) else []
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    own = declared.union(name for name, imported in bound if not imported)
    imported = {name for name, imported in bound if imported} - own
    complete = "__getattr__" not in own | imported and not any(map(_is_dynamic, nodes))
    return _Source(frozenset(own), frozenset(imported), complete)


def _is_dynamic(node: ast.AST) -> bool:
    """Say whether more names than can be read may come from ``node``."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in _DYNAMIC
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return True
    return False


def _bound(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yield the names that statements of a module bind in it, and whether by an import."""
    for node in nodes:
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                yield from (((a.asname or a.name).partition(".")[0], True) for a in aliases)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, False
            case ast.ClassDef(name=name):
                yield name, False
            case ast.Name(id=name, ctx=ast.Store()):
                yield name, False
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name, False
                yield from _bound(ast.iter_child_nodes(node))
            case _:
                yield from _bound(ast.iter_child_nodes(node))


def _submodules(folders: Iterable[str]) -> list[str]:
    found = []
    for folder in map(Path, folders):
        if folder.is_dir():
            found += [p.name.partition(".")[0] for p in folder.iterdir() if p.name[0] not in "._"]
    return found
