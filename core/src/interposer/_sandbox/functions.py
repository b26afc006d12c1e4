"""The functions that others rely on, and what they meant before code ran."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import attrgetter
from types import FunctionType
from typing import Any, NamedTuple

from interposer._sandbox.remains import origin

# Packages of Python, and modules and classes of torch, whose functions everybody calls. A fork
# that looks at all there are spends longer on copies of its parent's memory than on the plugin.
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
# Packages that this one is built on; of them and of its own the classes as well.
_BASES = frozenset({"importlib_metadata", "packaging", "pluggy"})
_CLASSES = {
    "json": ("JSONDecoder", "JSONEncoder"),
    "logging": ("Logger",),
    "pathlib": ("Path", "PurePath"),
    "pydantic.main": ("BaseModel",),
    "subprocess": ("Popen",),
    "threading": ("Thread",),
}


class _Held(NamedTuple):
    """The modules and classes whose functions others rely on, by name, each with what it held.

    ``ops`` are the custom ops that are found there, ``seen`` the modules that were looked at.
    """

    modules: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    classes: dict[str, tuple[type, dict[str, Any]]]
    ops: dict[str, Any]
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
        for name in [*(sys.modules.keys() - self.seen)]:
            self.seen.add(name)
            held = getattr(sys.modules.get(name), "__dict__", None)
            if _is_watched(name) and isinstance(held, dict):
                self.modules[name] = (held, dict(held))
                ops = [*held.items()] if name.startswith("interposer_") else ()
                self.ops.update(
                    (f"{name}.{k}", v) for k, v in ops if type(v).__name__ == "CustomOp"
                )
                if name.startswith("interposer.") or name.partition(".")[0] in _BASES:
                    # What stands for a module that is not imported yet is asked nothing.
                    own = (v for v in [*held.values()] if issubclass(type(v), type))
                    self._add({f"{name}.{v.__name__}": v for v in own if v.__module__ == name})
                elif name in _CLASSES:
                    self._add({f"{name}.{part}": held[part] for part in _CLASSES[name]})
        torch = sys.modules.get("torch")
        if hasattr(torch, "nn") and f"torch.{_TORCH_CLASSES[0]}" not in self.classes:
            self._add({f"torch.{path}": attrgetter(path)(torch) for path in _TORCH_CLASSES})

    def _add(self, classes: Mapping[str, type]) -> None:
        self.classes.update({name: (owner, dict(vars(owner))) for name, owner in classes.items()})


_held = _Held({}, {}, {}, set())
_forked = False


def hold_for_forks() -> None:
    """Note what functions mean, in a process that forks for each task."""
    global _forked
    _forked = False
    _held.refresh()
    _forked = True


def hold() -> _Held:
    """Return what functions mean now; a fork copies only what was imported since it was forked."""
    _held.refresh()
    return _held


def is_foreign(place: str, value: object) -> bool:
    """Say whether a module of those that this package is built on has a value from elsewhere.

    One imports what it needs where it first uses it, and replaces what stood for that.
    """
    root = place.partition(".")[0]
    own = issubclass(type(value), FunctionType | type) and origin(value) == root
    return root in _BASES and not own


def _is_watched(name: str) -> bool:
    root = name.partition(".")[0]
    known = root in _PYTHONS or root in _BASES or root.startswith("interposer")
    return known or name in _TORCH_MODULES or name in _CLASSES


def is_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Say whether nothing was added or replaced; values that are one and the same are equal."""
    try:
        return now == before
    except Exception:  # noqa: BLE001 - that of a tensor, or of what somebody put there
        return False
