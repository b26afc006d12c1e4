"""The side effects of code on the process around it, found by comparing before and after."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from interposer_sandbox._functions import hold, is_same
from interposer_sandbox._host import Host
from interposer_sandbox._remains import offspring, origin, streams
from interposer_sandbox._settings import settings

_MOST_NAMED = 5
_SIGNALS = [
    getattr(signal, name)
    for name in (
        *("SIGABRT", "SIGALRM", "SIGBUS", "SIGCHLD", "SIGFPE", "SIGHUP", "SIGILL", "SIGINT"),
        *("SIGPIPE", "SIGQUIT", "SIGSEGV", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH"),
    )
    if hasattr(signal, name)
]
# The plain function: that of the module turns every answer into an enum first.
_getsignal = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
# torch's compiler sets these when it is first imported.
_TORCHS_OWN = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")
_STANDARD = (0, 1, 2)
# They make modules of what they generate.
_PLANTERS = ("__mp_main__", "torch", "triton", "cython_runtime", "_cython_")
_HOOKS = ("sys.meta_path", "sys.path_hooks", "the callbacks of the garbage collector")
# Libraries that report errors install these, and mean to.
_REPORTERS = frozenset(
    {"sys.displayhook", "sys.excepthook", "sys.unraisablehook", "threading.excepthook"}
)


_ANCHORS = (
    *((sys, name) for name in ("modules", "meta_path", "path_hooks", "path_importer_cache")),
    *((sys, name) for name in ("stdin", "__stdin__", "__stdout__", "__stderr__")),
    (os, "environ"),
)
_EVERYBODYS = (Warning, UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning)


class SideEffects:
    """Lists in ``effects`` what the code in a ``with`` block did beside its work.

    Each effect completes a sentence: "replaces builtins.print". What can be put back is: the
    environment, builtins, modules and their functions, the working directory, ``sys.path`` and
    hooks, signal handlers, standard streams, settings. What the block raises passes.

    Args:
        light: the code is that of a module which only declares things: it has no reason to print,
            to start a process, to leave a thread or to hook into the interpreter. Libraries that
            other code loads may do these; the code's own package may not.
        alone: this process is there for the block only, so that a new thread is one of the
            block's. In any other, what all threads share is compared only while there is but
            one: else changes of the others would be blamed on the block, and undone.
        package: the top-level package that the code belongs to, which may change itself.
        calls: the block only calls what was loaded before, so that no thread may be left.
    """

    def __init__(
        self,
        host: Host,
        *,
        light: bool = True,
        alone: bool = True,
        package: str = "",
        calls: bool = False,
    ) -> None:
        self.host = host
        self.light = light
        self.alone = alone
        self.package = package
        self.calls = calls
        self.effects: list[str] = []

    def __enter__(self) -> SideEffects:
        shared = not self.alone and threading.active_count() > 1
        self.effects = []
        self._comparisons: list[Iterator[str]] = []
        if self.light:
            self._comparisons += [streams(shared)]
        if not shared:
            # The others call functions. What is given in code is of whoever gives it.
            self._comparisons += [_anchors()]  # before those who go by what these hold
            self._comparisons += [self._functions()] if self.alone or self.package else []
            self._comparisons += [
                _environment(self.host.environment),
                _modules(),
                self._planted(),
                _path(),
                _cwd(),
                _handlers(),
                _descriptors(self.alone),
                *map(self._hooks, (sys.meta_path, sys.path_hooks, gc.callbacks), _HOOKS),
                self._filters(),
                self._settings(),
            ]
        if self.alone:
            self._comparisons += [offspring(self.light, self.calls, self.package)]
        if self.light and not shared:
            self._comparisons += [_exit_handlers()]
        for comparison in self._comparisons:
            next(comparison)
        self._builtins = dict(vars(builtins))
        return self

    def __exit__(self, *raised: object) -> None:
        # First, and without calling any: the rest needs them.
        now, before = builtins.__dict__, self._builtins
        changed = _changed(now, before)
        added = [name for name in now if name not in before]
        now.update(before)
        for name in added:
            del now[name]
        self.effects += [f"replaces builtins.{name}" for name in changed]
        self.effects += [f"adds builtins.{name}" for name in added]
        for comparison in self._comparisons:
            self.effects += comparison

    # Each of these looks at one part of the process, and yields once to let the block run. Then
    # it looks again, puts back what it can and yields the effects; so do the functions below.

    def _is_own(self, value: object) -> bool:
        """Say whether a function or object is defined by the package of the block's code."""
        return not self.package or origin(value) == self.package

    def _planted(self) -> Iterator[str]:
        before, own = set(sys.modules), [self.package] if self.package else []
        yield ""
        new = [name for name in [*sys.modules] if name not in before and not _is_imported(name)]
        names = [name for name in new if not _root(name).startswith((*own, *_PLANTERS))]
        known = {_root(name) for name in before} if names else set()
        if not self.light:  # what a library that was first imported here calls its own, is it
            names = [n for n in names if _root(n) in known or not _is_imported(_root(n))]
        for name in names:
            del sys.modules[name]
        if names:
            yield f"plants {_listed([*map(repr, names)])} in sys.modules"

    def _hooks(self, hooks: Any, name: str) -> Iterator[str]:
        before = [*hooks]
        yield ""
        known, found = {*map(id, before)}, {*map(id, hooks)}
        new = [hook for hook in hooks if id(hook) not in known]
        if known - found or (new and self.light) or any(map(self._is_own, new)):
            hooks[:] = before
            yield f"changes {name}"

    def _filters(self) -> Iterator[str]:
        filters: list[Any] = warnings.filters  # type: ignore[assignment]
        before = [*filters]
        yield ""
        new = [entry for entry in filters if entry not in before]
        # A library may have filters for warnings of its own, but not for those of everybody.
        lost = [entry for entry in before if entry not in filters]
        if any(_is_for_all(*entry) for entry in new) or (lost and self.light):
            filters[:] = before
            yield "changes the filters of warnings"

    def _settings(self) -> Iterator[str]:
        before = [(setting, setting.get()) for setting in settings(self.light)]
        yield ""
        for setting, value in before:
            if setting.get() != value:
                setting.put(value)
                yield f"changes {setting.name}"

    def _functions(self) -> Iterator[str]:
        held = hold(self.host.guarded)
        yield ""
        names = []
        for place, (space, kept) in held.modules.items():
            if is_same(space, kept):
                continue
            for name in _changed(space, kept) if _root(place) != self.package else ():
                path, value = f"{place}.{name}", kept[name]
                if held.is_foreign(place, value) or not (
                    callable(value) or _is_constant(path, value)
                ):
                    continue
                if self.light or not self._is_a_librarys(path, space, name):
                    names.append(path)
                    space[name] = value
            held.modules[place] = (space, dict(space))
        for place, (owner, kept) in held.classes.items():
            if is_same(vars(owner), kept):
                continue
            for name in _changed(vars(owner), kept):
                if callable(kept[name]) or hasattr(type(kept[name]), "__get__"):
                    names.append(f"{place}.{name}")
                    setattr(owner, name, kept[name])
            for name in [name for name in vars(owner) if name not in kept]:
                if any(name in vars(base) for base in owner.__mro__[1:]):
                    names.append(f"{place}.{name}")
                    delattr(owner, name)
        held.look()  # the block may have imported further members
        for place, (owner, part) in held.members.items() if self.package else ():
            if origin(getattr(owner, part)) == self.package != _root(place):
                names.append(place)
        if names:
            yield f"replaces {_listed(names)}"

    def _is_a_librarys(self, path: str, space: Mapping[str, Any], name: str) -> bool:
        """Say whether a function was replaced by its own library, or by one that reports errors."""
        value = space.get(name)
        if path in _REPORTERS:
            return not self._is_own(value)
        place = origin(value)
        if place == _root(path):
            # The one follows the default dtype.
            return getattr(value, "__name__", "") == name or path == "torch.Storage"
        pythons = place in sys.stdlib_module_names
        return not pythons and bool(self.package) and place != self.package


def _is_constant(path: str, value: object) -> bool:
    """Say whether a value of a module is a constant that everybody computes with."""
    return _root(path) in ("math", "torch") and (
        type(value) is float or type(value).__module__ == "torch"
    )


def _root(name: str) -> str:
    return name.partition(".")[0]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _changed(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the names that are gone or mean something else; no builtin function is called."""
    return [name for name in before if name not in now or now[name] is not before[name]]


def _is_imported(name: str) -> bool:
    """Say whether a module came about by an import of its name, or put an object there itself."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return getattr(spec, "name", None) == name or _root(type(module).__module__) == _root(name)


def _is_for_all(
    action: str, message: object, category: type[Warning], module: object, line: int
) -> bool:
    """Say whether a filter speaks of the warnings of everybody."""
    return message is None and module is None and not line and category in _EVERYBODYS


def _anchors() -> Iterator[str]:
    """Compare the objects themselves that interpreter and programs hold state in."""
    before = [(owner, name, getattr(owner, name)) for owner, name in _ANCHORS]
    yield ""
    for owner, name, value in before:
        if getattr(owner, name, None) is not value:
            setattr(owner, name, value)
            yield f"replaces {owner.__name__}.{name}"


def _environment(environment: Callable[[], MutableMapping[str, str]]) -> Iterator[str]:
    before = dict(environment())
    yield ""
    variables = environment()
    after = dict(variables)
    names = sorted(before.keys() | after.keys()) if after != before else ()
    names = [name for name in names if before.get(name) != after.get(name)]
    for name in names:
        if name in before:
            variables[name] = before[name]
        else:
            del variables[name]
    told = [name for name in names if not name.startswith(_TORCHS_OWN)]
    if told:
        yield f"changes the environment: {', '.join(told)}"


def _modules() -> Iterator[str]:
    before = dict(sys.modules)
    yield ""
    for name in _changed(sys.modules, before):
        yield f"{'replaces' if name in sys.modules else 'removes'} the module {name!r}"
        sys.modules[name] = before[name]


def _path() -> Iterator[str]:
    path, entries = sys.path, [*sys.path]
    yield ""
    if sys.path is not path or path != entries:
        sys.path = path
        path[:] = entries
        yield "changes sys.path"


def _cwd() -> Iterator[str]:
    before = _working_directory()
    yield ""
    if _working_directory() != before:
        with contextlib.suppress(OSError):  # it may be gone
            os.chdir(before)
        yield "changes the working directory"


def _handlers() -> Iterator[str]:
    before = [_getsignal(number) for number in _SIGNALS]
    yield ""
    for number, handler in zip(_SIGNALS, before, strict=True):
        if _getsignal(number) is not handler:
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)
            yield f"installs a handler for {number.name}"


def _descriptors(alone: bool) -> Iterator[str]:
    # In a program of many parts another one may close its files meanwhile.
    before = _open_files() if alone else {n: file for n in _STANDARD if (file := _file(n))}
    copies = {number: os.dup(number) for number in _STANDARD if number in before}
    yield ""
    for number, file in before.items():
        found = _file(number)
        if found != file:
            if number in copies and _file(copies[number]) == file:
                os.dup2(copies[number], number)
            yield f"{'redirects' if found else 'closes'} the file descriptor {number}"
    for number, copy in copies.items():
        if _file(copy) == before[number]:
            os.close(copy)
        else:
            yield f"closes the file descriptor {copy}"


def _exit_handlers() -> Iterator[str]:
    before = atexit._ncallbacks()
    yield ""
    if atexit._ncallbacks() > before:
        yield "registers a function for the end of the program"


def _open_files() -> dict[int, tuple[int, int]]:
    """Return what the open file descriptors lead to; of the standard ones where none is listed."""
    try:
        numbers = sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    except OSError:
        numbers = [*_STANDARD]
    return {number: file for number in numbers if (file := _file(number))}


def _file(number: int) -> tuple[int, int] | None:
    try:
        facts = os.fstat(number)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return ""
