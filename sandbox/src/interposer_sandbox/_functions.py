"""The functions that others rely on, and what they meant before code ran."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from operator import attrgetter
from typing import Any, NamedTuple

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


class _Held(NamedTuple):
    """The modules and classes whose functions others rely on, by name, each with what it held.

    ``packages`` are those of the host; ``seen`` are the modules that were looked at.
    """

    packages: tuple[str, ...]
    modules: dict[str, tuple[dict[str, Any], dict[str, Any]]]
    classes: dict[str, tuple[type, dict[str, Any]]]
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
            if self._is_watched(name) and isinstance(held, dict):
                self.modules[name] = (held, dict(held))
                if _root(name) in self.packages:
                    own = (v for v in [*held.values()] if isinstance(v, type))
                    self._add({f"{name}.{v.__name__}": v for v in own if v.__module__ == name})
        torch = sys.modules.get("torch")
        if hasattr(torch, "nn") and f"torch.{_TORCH_CLASSES[0]}" not in self.classes:
            self._add({f"torch.{path}": attrgetter(path)(torch) for path in _TORCH_CLASSES})

    def _is_watched(self, name: str) -> bool:
        root = _root(name)
        return root in _PYTHONS or root.startswith(self.packages) or name in _TORCH_MODULES

    def _add(self, classes: Mapping[str, type]) -> None:
        self.classes.update({name: (owner, dict(vars(owner))) for name, owner in classes.items()})


_helds: dict[tuple[str, ...], _Held] = {}
_forked = False


def hold_for_forks(packages: tuple[str, ...]) -> None:
    """Note what functions mean, in a process that forks for each task."""
    global _forked
    _forked = False
    hold(packages)
    _forked = True


def hold(packages: tuple[str, ...]) -> _Held:
    """Return what functions mean now; a fork copies only what was imported since it was forked.

    Args:
        packages: those of the host.
    """
    held = _helds.setdefault(packages, _Held(packages, {}, {}, set()))
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
