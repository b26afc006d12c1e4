"""Snapshots of widely used functions, to detect and undo replacements by foreign code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

from interposer_sandbox._host import Guarded
from interposer_sandbox._remains import origin

# Packages of Python, and modules and classes of torch, whose functions are used everywhere. Looking
# at every module would make a fork copy more of its parent's memory than the code is worth.
_PYTHON_PACKAGES = frozenset(
    {
        *("abc", "asyncio", "atexit", "collections", "concurrent", "contextlib", "copy"),
        *("ctypes", "dataclasses", "enum", "functools", "gc", "glob", "hashlib", "http"),
        *("importlib", "inspect", "io", "itertools", "json", "locale", "logging", "math", "mmap"),
        *("multiprocessing", "ntpath", "operator", "os", "pathlib", "pickle", "platform"),
        *("posixpath", "queue", "random", "re", "shutil", "signal", "site", "socket", "ssl"),
        *("statistics", "struct", "subprocess", "sys", "tempfile", "threading", "time"),
        *("traceback", "types", "urllib", "uuid", "warnings", "weakref", "zipfile"),
    }
)
_TORCH_MODULES = frozenset(
    {
        *("torch", "torch._C._nn", "torch._ops", "torch.autograd"),
        *("torch.library", "torch.linalg", "torch.nn", "torch.nn.functional", "torch.random"),
        *("torch.nn.modules.module", "torch.serialization", "torch.special"),
    }
)
_TORCH_CLASSES = ("Tensor", "nn.Module", "nn.Linear", "nn.Embedding", "Generator")
_CLASSES = {
    "json": ("JSONDecoder", "JSONEncoder"),
    "logging": ("Logger",),
    "pathlib": ("Path", "PurePath"),
    "subprocess": ("Popen",),
    "threading": ("Thread",),
}


class _Snapshot(NamedTuple):
    """The watched modules and classes by name, each with a copy of the namespace.

    ``class_names`` lists additional classes by module; ``members`` maps a path to an object of the
    host and the name of the guarded attribute; ``visited`` are the modules examined so far.
    """

    guarded: Guarded
    class_names: dict[str, list[str]]
    modules: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    classes: dict[str, tuple[type, dict[str, Any]]]
    members: dict[str, tuple[Any, str]]
    visited: set[str]

    def refresh(self) -> None:
        """Update the copied namespaces with additions and replacements since the last call."""
        # In a fork that runs a single task, nothing is replaced without an import.
        if _forked and not sys.modules.keys() - self.visited:
            return
        for place, (space, copied) in self.modules.items():
            if not is_same(space, copied):
                self.modules[place] = (space, dict(space))
        for place, (owner, copied) in self.classes.items():
            if not is_same(vars(owner), copied):
                self.classes[place] = (owner, dict(vars(owner)))
        self.add_new_modules()

    def add_new_modules(self) -> None:
        """Add the modules that were imported since the last call."""
        for name in [*(sys.modules.keys() - self.visited)]:
            self.visited.add(name)
            content = getattr(sys.modules.get(name), "__dict__", None)
            if self._is_watched(name) and isinstance(content, dict):
                self.modules[name] = (content, dict(content))
                self._note(name, content)
        torch = sys.modules.get("torch")
        # Another thread may be importing torch, so its classes may not exist yet.
        if hasattr(torch, "nn") and f"torch.{_TORCH_CLASSES[0]}" not in self.classes:
            self._add({f"torch.{path}": attrgetter(path)(torch) for path in _TORCH_CLASSES})

    def _is_watched(self, name: str) -> bool:
        root = _root(name)
        is_common = root in _PYTHON_PACKAGES or root in self.guarded.bases
        is_common = is_common or name in _TORCH_MODULES
        return is_common or root.startswith(self.guarded.packages) or name in self.class_names

    def _note(self, name: str, content: Mapping[str, Any]) -> None:
        """Add the classes and watched members of an imported module to the snapshot."""
        root, own_packages = _root(name), self.guarded.packages
        if root in own_packages or root in self.guarded.bases:
            # issubclass on the type, because isinstance would trigger lazy module placeholders.
            classes = [v for v in [*content.values()] if issubclass(type(v), type)]
            self._add({f"{name}.{v.__name__}": v for v in classes if v.__module__ == name})
        for part in self.class_names.get(name, ()):
            self._add({f"{name}.{part}": content[part]})
        if root.startswith(own_packages):
            parts = dict(member.split(".") for member in self.guarded.members)
            # A copy, because another thread may import into the module meanwhile.
            for key, value in [*content.items()]:
                if (member := parts.get(type(value).__name__)) is not None:
                    self.members[f"{name}.{key}.{member}"] = value, member

    def is_foreign(self, place: str, value: object) -> bool:
        """Tell whether a value in a module of a base package comes from another package.

        A base package may import a dependency on first use and then replace the placeholder.
        """
        root = _root(place)
        is_own = issubclass(type(value), FunctionType | type) and origin(value) == root
        return root in self.guarded.bases and not is_own

    def _add(self, classes: Mapping[str, type]) -> None:
        self.classes.update({name: (owner, dict(vars(owner))) for name, owner in classes.items()})


_snapshots: dict[Guarded, _Snapshot] = {}
_forked = False


def snapshot_for_forks(guarded: Guarded) -> None:
    """Take the snapshot in a process that forks for each task."""
    global _forked
    _forked = False
    take_snapshot(guarded)
    _forked = True


def take_snapshot(guarded: Guarded) -> _Snapshot:
    """Return the current snapshot; a fork copies only modules imported after the fork."""
    if guarded not in _snapshots:
        class_names = {module: [*names] for module, names in _CLASSES.items()}
        for place in guarded.classes:
            module, _, name = place.partition(":")
            class_names.setdefault(module, []).append(name)
        _snapshots[guarded] = _Snapshot(guarded, class_names, {}, {}, {}, set())
    snapshot = _snapshots[guarded]
    snapshot.refresh()
    return snapshot


def _root(name: str) -> str:
    return name.partition(".")[0]


def is_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Tell whether two mappings are equal; identical values count as equal."""
    try:
        return now == before
    except Exception:  # noqa: BLE001 - comparing tensors or foreign objects may raise
        return False
