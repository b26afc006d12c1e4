"""Checks that an import string names an existing object, without importing anything."""

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
# Matches every source text that may have a dynamic or a global statement, so that the others need
# no search of the syntax tree. Python normalizes identifiers, so non-ASCII letters may hide a name.
_MAY_BE_DYNAMIC = re.compile(
    rb"\b(?:global|%s)\b|import[\s(\\]*\*|[\x80-\xff]" % "|".join(_DYNAMIC).encode()
)


class _Source(NamedTuple):
    """The names that a source file binds; only imports bind the names in ``imported``."""

    defined: frozenset[str] = frozenset()
    imported: frozenset[str] = frozenset()
    complete: bool = True


def check_import_string(target: str) -> str:
    """Return why ``"package.module:name"`` names no object, or "".

    An imported module is inspected; for any other module the source file is read. The result is
    also "" if neither can tell: for modules that compute names at run time, and for native modules
    that are not imported.
    """
    module, _, attribute = target.partition(":")
    loaded = sys.modules.get(module)
    if loaded is not None and not _is_unfinished(loaded):
        return _check_loaded(loaded, module, attribute)
    parts = module.split(".")
    # find_spec of a dotted name would import the parents, so walk down by hand.
    spec = _top_level(parts[0])
    if spec is None:
        return "" if sys.modules.get(parts[0]) is not None else f"there is no module {parts[0]!r}"
    for number in range(1, len(parts)):
        name = ".".join(parts[: number + 1])
        # A parent that is already imported may have changed its search path, so trust its own
        # spec.
        if name in sys.modules:
            spec = getattr(sys.modules[name], "__spec__", None)
            if spec is None:
                return ""
            continue
        folders = spec.submodule_search_locations or ()
        submodule_spec = PathFinder.find_spec(name, list(folders))
        if submodule_spec is None:
            source = _source(spec)
            if not (source and source.complete):  # the package may extend its search path
                return ""
            submodules = _submodules(folders)
            return f"there is no module {name!r}{_nearest(parts[number], submodules)}"
        spec = submodule_spec
    return _check_attribute(spec, module, attribute)


def is_loaded(target: str) -> bool:
    """Tell whether an import string's module is imported and has the named attribute."""
    module, _, attribute = target.partition(":")
    loaded = sys.modules.get(module)
    return type(loaded) is ModuleType and attribute in vars(loaded)


def _is_unfinished(loaded: object) -> bool:
    """Tell whether a module is still being imported, so that some names may be missing."""
    return type(loaded) is ModuleType and getattr(
        vars(loaded).get("__spec__"), "_initializing", False
    )


def _check_loaded(loaded: object, module: str, attribute: str) -> str:
    # A module subclass or a __getattr__ may compute names. Neither is called, so any name passes.
    if type(loaded) is not ModuleType:
        return ""
    names = dict(vars(loaded))
    if attribute in names or "__getattr__" in names:
        return ""
    if attribute in _submodules(names.get("__path__", ())):
        return ""
    return f"{module} has no {attribute!r}{_nearest(attribute, _own_names(module, names))}"


def _own_names(module: str, names: dict[str, Any]) -> Iterator[str]:
    """Yield the names that an imported module defines, without the imported names."""
    source = _read(names.get("__file__"))
    for name, value in names.items():
        is_hidden = name.startswith("__") or (source is not None and name in source.imported)
        kind = type(value)
        if is_hidden or issubclass(kind, ModuleType):
            continue
        if not issubclass(kind, FunctionType | type) or value.__module__ == module:
            yield name


def _check_attribute(spec: ModuleSpec, module: str, attribute: str) -> str:
    source = _source(spec)
    if not (source and source.complete):
        return ""
    names = {*source.defined, *source.imported, *_submodules(spec.submodule_search_locations or ())}
    if attribute in names or (attribute.startswith("__") and attribute.endswith("__")):
        return ""
    return f"{module} has no {attribute!r}{_nearest(attribute, source.defined)}"


def _nearest(name: str, names: Iterable[str]) -> str:
    nearest = nearest_first(name, names)[:3]
    return f"; nearest: {', '.join(nearest)}" if nearest else ""


def _top_level(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except (ValueError, ImportError):  # created at run time without a spec
        return None


def _source(spec: ModuleSpec) -> _Source | None:
    """Return the names that a module's source binds, or None if no source can be read."""
    if spec.origin is None:
        return None if spec.submodule_search_locations is None else _Source()
    return _read(spec.origin)


def _read(file: object) -> _Source | None:
    if type(file) is not str or not file.endswith(".py"):
        return None
    path = Path(file)
    try:
        status = path.stat()
    except (OSError, ValueError):
        return None
    return _parse(path, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=256)
def _parse(path: Path, _mtime_ns: int, _size: int) -> _Source | None:
    try:
        text = path.read_bytes()
        tree = ast.parse(text)
        bindings = list(_bound_names(tree.body))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None  # importing the module gives a better error
    # Walking the whole tree is slow, so only suspicious modules pay for it.
    nodes = list(ast.walk(tree)) if _MAY_BE_DYNAMIC.search(text) else []
    declared = {name for node in nodes if isinstance(node, ast.Global) for name in node.names}
    own_names = declared.union(name for name, imported_names in bindings if not imported_names)
    imported_names = {name for name, imported_names in bindings if imported_names} - own_names
    complete = "__getattr__" not in own_names | imported_names and not any(map(_is_dynamic, nodes))
    return _Source(frozenset(own_names), frozenset(imported_names), complete)


def _is_dynamic(node: ast.AST) -> bool:
    """Tell whether ``node`` may define names that the source does not show."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in _DYNAMIC
        case ast.ImportFrom(names=[ast.alias(name="*")]):
            return True
    return False


def _bound_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, bool]]:
    """Yield each name that statements bind in a module, and whether an import binds the name."""
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
                yield from _bound_names(ast.iter_child_nodes(node))
            case _:
                yield from _bound_names(ast.iter_child_nodes(node))


def _submodules(folders: Iterable[str]) -> list[str]:
    names = []
    for folder in map(Path, folders):
        if folder.is_dir():
            names += [p.name.partition(".")[0] for p in folder.iterdir() if p.name[0] not in "._"]
    return names
