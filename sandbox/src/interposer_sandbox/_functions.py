"""The functions that others rely on, and what they meant before code ran."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

from interposer_sandbox._host import Guarded
from interposer_sandbox._remains import origin

# Packages of Python, and modules and classes of torch, whose functions everybody calls. A fork
# that looks at all there are spends longer on copies of its parent's memory than on the code.
_PYTHONS = frozenset(
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


class _Held(NamedTuple):
    """The modules and classes whose functions others rely on, by name, each with what it held.

    ``others`` are the names of further classes by those of their modules; ``members`` are objects
    of the host with the attribute that counts; ``seen`` are the modules that were looked at.
    """

    guarded: Guarded
    others: dict[str, list[str]]
    modules: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    classes: dict[str, tuple[type, dict[str, Any]]]
    members: dict[str, tuple[Any, str]]
    seen: set[str]

    def refresh(self) -> None:
        """Note what was added or replaced since."""
        # In a fork that is there for one task nobody replaces anything without an import.
        if _forked and not sys.modules.keys() - self.seen:
            return
        for place, (space, kept) in self.modules.items():
            if not is_same(space, kept):
                self.modules[place] = (space, dict(space))
        for place, (owner, kept) in self.classes.items():
            if not is_same(vars(owner), kept):
                self.classes[place] = (owner, dict(vars(owner)))
        self.look()

    def look(self) -> None:
        """Note what was imported since."""
        for name in [*(sys.modules.keys() - self.seen)]:
            self.seen.add(name)
            held = getattr(sys.modules.get(name), "__dict__", None)
            if self._is_watched(name) and isinstance(held, dict):
                self.modules[name] = (held, dict(held))
                self._note(name, held)
        torch = sys.modules.get("torch")
        if hasattr(torch, "nn") and f"torch.{_TORCH_CLASSES[0]}" not in self.classes:
            self._add({f"torch.{path}": attrgetter(path)(torch) for path in _TORCH_CLASSES})

    def _is_watched(self, name: str) -> bool:
        root = _root(name)
        known = root in _PYTHONS or root in self.guarded.bases or name in _TORCH_MODULES
        return known or root.startswith(self.guarded.packages) or name in self.others

    def _note(self, name: str, held: Mapping[str, Any]) -> None:
        """Note the classes and members of a module that was imported."""
        root, own = _root(name), self.guarded.packages
        if root in own or root in self.guarded.bases:
            # What stands for a module that is not imported yet is asked nothing.
            classes = [v for v in [*held.values()] if issubclass(type(v), type)]
            self._add({f"{name}.{v.__name__}": v for v in classes if v.__module__ == name})
        for part in self.others.get(name, ()):
            self._add({f"{name}.{part}": held[part]})
        if root.startswith(own):
            parts = dict(member.split(".") for member in self.guarded.members)
            for key, value in [*held.items()]:
                if (member := parts.get(type(value).__name__)) is not None:
                    self.members[f"{name}.{key}.{member}"] = value, member

    def is_foreign(self, place: str, value: object) -> bool:
        """Say whether a module of the bases has a value from elsewhere.

        One imports what it needs where it first uses it, and replaces what stood for that.
        """
        root = _root(place)
        own = issubclass(type(value), FunctionType | type) and origin(value) == root
        return root in self.guarded.bases and not own

    def _add(self, classes: Mapping[str, type]) -> None:
        self.classes.update({name: (owner, dict(vars(owner))) for name, owner in classes.items()})


_helds: dict[Guarded, _Held] = {}
_forked = False


def hold_for_forks(guarded: Guarded) -> None:
    """Note what functions mean, in a process that forks for each task."""
    global _forked
    _forked = False
    hold(guarded)
    _forked = True


def hold(guarded: Guarded) -> _Held:
    """Return what functions mean now; a fork copies only what was imported since it was forked."""
    if guarded not in _helds:
        others = {module: [*names] for module, names in _CLASSES.items()}
        for place in guarded.classes:
            module, _, name = place.partition(":")
            others.setdefault(module, []).append(name)
        _helds[guarded] = _Held(guarded, others, {}, {}, {}, set())
    held = _helds[guarded]
    held.refresh()
    return held


def _root(name: str) -> str:
    return name.partition(".")[0]


def is_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Say whether nothing was added or replaced; values that are one and the same are equal."""
    try:
        return now == before
    except Exception:  # noqa: BLE001 - that of a tensor, or of what somebody put there
        return False
