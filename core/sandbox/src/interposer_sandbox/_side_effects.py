"""Side effects of code, detected by comparing the process before and after the code ran."""

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

from interposer_sandbox._functions import is_same, take_snapshot
from interposer_sandbox._host import Host
from interposer_sandbox._remains import offspring, origin, streams
from interposer_sandbox._settings import settings

_MAX_NAMES = 5
_SIGNALS = [
    getattr(signal, name)
    for name in (
        *("SIGABRT", "SIGALRM", "SIGBUS", "SIGCHLD", "SIGFPE", "SIGHUP", "SIGILL", "SIGINT"),
        *("SIGPIPE", "SIGQUIT", "SIGSEGV", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGWINCH"),
    )
    if hasattr(signal, name)
]
# The wrapped function, because signal.getsignal converts every result to an enum.
_getsignal = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
# torch's compiler sets variables with these prefixes when it is first imported.
_TORCH_VARIABLES = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")
_STANDARD = (0, 1, 2)
# These packages create modules for generated code.
_MODULE_GENERATORS = ("__mp_main__", "torch", "triton", "cython_runtime", "_cython_")
_HOOKS = ("sys.meta_path", "sys.path_hooks", "the callbacks of the garbage collector")
# Libraries for error reports replace these hooks on purpose.
_REPORTERS = frozenset(
    {"sys.displayhook", "sys.excepthook", "sys.unraisablehook", "threading.excepthook"}
)

# Later comparisons read these objects, so a replaced object would hide other changes.
_ANCHORS = (
    *((sys, name) for name in ("modules", "meta_path", "path_hooks", "path_importer_cache")),
    *((sys, name) for name in ("stdin", "__stdin__", "__stdout__", "__stderr__")),
    (os, "environ"),
)
# A filter for one of these categories also hides warnings of other packages.
_COMMON_CATEGORIES = (Warning, UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning)


class SideEffects:
    """Lists in ``effects`` the side effects of the code in a ``with`` block.

    Each effect completes a sentence: "replaces builtins.print". Effects are undone where possible:
    on environment variables, builtins, modules, functions, the working directory, ``sys.path``,
    hooks, signal handlers, standard streams and settings. Exceptions in the block are passed on.

    Args:
        light: the code is a module of declarations, with no reason to print, start a process,
            leave a thread or hook into the interpreter. If false, libraries that the code loads may
            do so, but not the code's own package.
        alone: this process exists only for the block, so that every new thread belongs to the
            block. In any other process, shared state is compared only while there is a single
            thread: otherwise changes by other threads would be attributed to the block, and undone.
        package: the top-level package of the code; the package may change its own modules.
        calls: the block only calls code that was loaded before, so no thread may be left running.
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
            # Function snapshots come early, because later comparisons call these functions. Code
            # without a package, in a shared process, may replace functions of its own program.
            self._comparisons += [_anchors()]  # first: later comparisons read these objects
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
        # Restore builtins first and without calling any, because the comparisons call them.
        current, before = builtins.__dict__, self._builtins
        changed = _changed(current, before)
        added = [name for name in current if name not in before]
        current.update(before)
        for name in added:
            del current[name]
        self.effects += [f"replaces builtins.{name}" for name in changed]
        self.effects += [f"adds builtins.{name}" for name in added]
        for comparison in self._comparisons:
            self.effects += comparison

    # Each generator below records one part of the process and yields once to let the block run.
    # Then it compares, restores as much as it can, and yields the effects as text.

    def _is_own(self, value: object) -> bool:
        """Tell whether the examined package defines ``value``; True if no package is set."""
        return not self.package or origin(value) == self.package

    def _planted(self) -> Iterator[str]:
        before, own_packages = set(sys.modules), [self.package] if self.package else []
        yield ""
        new_modules = [
            name for name in [*sys.modules] if name not in before and not _is_imported(name)
        ]
        names = [
            name
            for name in new_modules
            if not _root(name).startswith((*own_packages, *_MODULE_GENERATORS))
        ]
        known_packages = {_root(name) for name in before} if names else set()
        # A library that was first imported by the block may create modules below its own name.
        if not self.light:
            names = [n for n in names if _root(n) in known_packages or not _is_imported(_root(n))]
        for name in names:
            del sys.modules[name]
        if names:
            yield f"plants {_join_names([*map(repr, names)])} in sys.modules"

    def _hooks(self, hooks: Any, name: str) -> Iterator[str]:
        before = [*hooks]
        yield ""
        ids_before, ids_after = {*map(id, before)}, {*map(id, hooks)}
        new_hooks = [hook for hook in hooks if id(hook) not in ids_before]
        if (
            ids_before - ids_after
            or (new_hooks and self.light)
            or any(map(self._is_own, new_hooks))
        ):
            hooks[:] = before
            yield f"changes {name}"

    def _filters(self) -> Iterator[str]:
        filters: list[Any] = warnings.filters  # type: ignore[assignment]
        before = [*filters]
        yield ""
        new_filters = [entry for entry in filters if entry not in before]
        # A library may add filters for its own warnings, but not for common categories.
        lost_filters = [entry for entry in before if entry not in filters]
        if any(_is_for_all(*entry) for entry in new_filters) or (lost_filters and self.light):
            filters[:] = before
            yield "changes the filters of warnings"

    def _settings(self) -> Iterator[str]:
        before = [(setting, setting.get()) for setting in settings(self.light)]
        yield ""
        for setting, value in before:
            if setting.get() != value:
                setting.restore(value)
                yield f"changes {setting.name}"

    def _functions(self) -> Iterator[str]:
        snapshot = take_snapshot(self.host.guarded)
        yield ""
        names = []
        for place, (space, copied) in snapshot.modules.items():
            if is_same(space, copied):
                continue
            for name in _changed(space, copied) if _root(place) != self.package else ():
                path, value = f"{place}.{name}", copied[name]
                if snapshot.is_foreign(place, value) or not (
                    callable(value) or _is_constant(path, value)
                ):
                    continue
                if self.light or not self._is_library_replacement(path, space, name):
                    names.append(path)
                    space[name] = value
            snapshot.modules[place] = (space, dict(space))
        for place, (owner, copied) in snapshot.classes.items():
            if is_same(vars(owner), copied):
                continue
            for name in _changed(vars(owner), copied):
                if callable(copied[name]) or hasattr(type(copied[name]), "__get__"):
                    names.append(f"{place}.{name}")
                    setattr(owner, name, copied[name])
            # An added attribute that overrides an inherited one replaces behaviour too.
            for name in [name for name in vars(owner) if name not in copied]:
                if any(name in vars(base) for base in owner.__mro__[1:]):
                    names.append(f"{place}.{name}")
                    delattr(owner, name)
        snapshot.add_new_modules()  # the block may have imported further members
        for place, (owner, part) in snapshot.members.items() if self.package else ():
            if origin(getattr(owner, part)) == self.package != _root(place):
                names.append(place)
        if names:
            yield f"replaces {_join_names(names)}"

    def _is_library_replacement(self, path: str, space: Mapping[str, Any], name: str) -> bool:
        """Tell whether a library or error reporter, not the examined package, rebound ``name``."""
        value = space.get(name)
        if path in _REPORTERS:
            return not self._is_own(value)
        place = origin(value)
        if place == _root(path):
            # torch.Storage changes with the default dtype.
            return getattr(value, "__name__", "") == name or path == "torch.Storage"
        is_stdlib = place in sys.stdlib_module_names
        return not is_stdlib and bool(self.package) and place != self.package


def _is_constant(path: str, value: object) -> bool:
    """Tell whether a value is a constant of math or torch, such as pi or a dtype."""
    return _root(path) in ("math", "torch") and (
        type(value) is float or type(value).__module__ == "torch"
    )


def _root(name: str) -> str:
    return name.partition(".")[0]


def _join_names(names: list[str]) -> str:
    suffix = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + suffix


def _changed(current: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Return the names in ``before`` that ``current`` lacks or rebinds, without any builtin."""
    return [name for name in before if name not in current or current[name] is not before[name]]


def _is_imported(name: str) -> bool:
    """Tell whether ``sys.modules[name]`` is the imported module or the module's substitute."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    return getattr(spec, "name", None) == name or _root(type(module).__module__) == _root(name)


def _is_for_all(
    action: str, message: object, category: type[Warning], module: object, line: int
) -> bool:
    """Tell whether a warning filter applies to a common warning category in every module."""
    return message is None and module is None and not line and category in _COMMON_CATEGORIES


def _anchors() -> Iterator[str]:
    """Yield "" while code runs, then restore and report objects that the code replaced."""
    before = [(owner, name, getattr(owner, name)) for owner, name in _ANCHORS]
    yield ""
    for owner, name, value in before:
        if getattr(owner, name, None) is not value:
            setattr(owner, name, value)
            yield f"replaces {owner.__name__}.{name}"


def _environment(environment: Callable[[], MutableMapping[str, str]]) -> Iterator[str]:
    before = dict(environment())
    yield ""
    # Call ``environment`` again, because the code may have replaced the mapping.
    variables = environment()
    after = dict(variables)
    names = sorted(before.keys() | after.keys()) if after != before else ()
    names = [name for name in names if before.get(name) != after.get(name)]
    for name in names:
        if name in before:
            variables[name] = before[name]
        else:
            del variables[name]
    reported_names = [name for name in names if not name.startswith(_TORCH_VARIABLES)]
    if reported_names:
        yield f"changes the environment: {', '.join(reported_names)}"


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
        with contextlib.suppress(OSError):  # the folder may be gone
            os.chdir(before)
        yield "changes the working directory"


def _handlers() -> Iterator[str]:
    before = [_getsignal(number) for number in _SIGNALS]
    yield ""
    for number, handler in zip(_SIGNALS, before, strict=True):
        if _getsignal(number) is not handler:
            # Python sets handlers only in the main thread, and cannot restore one of native code.
            if handler is not None and threading.current_thread() is threading.main_thread():
                signal.signal(number, handler)
            yield f"installs a handler for {number.name}"


def _descriptors(alone: bool) -> Iterator[str]:
    # In a shared process other threads may close their files meanwhile.
    before = _open_files() if alone else {n: file for n in _STANDARD if (file := _file(n))}
    # Duplicates of the standard descriptors, to restore them from.
    copies = {number: os.dup(number) for number in _STANDARD if number in before}
    yield ""
    for number, file in before.items():
        current_file = _file(number)
        if current_file != file:
            if number in copies and _file(copies[number]) == file:
                os.dup2(copies[number], number)
            yield f"{'redirects' if current_file else 'closes'} the file descriptor {number}"
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
    """Return device and inode of the open descriptors; only 0 to 2 without /proc."""
    try:
        numbers = sorted(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    except OSError:
        numbers = [*_STANDARD]
    return {number: file for number in numbers if (file := _file(number))}


def _file(number: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # the folder was removed
        return ""
