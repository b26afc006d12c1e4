"""The hooks of one plugin: checked, registered, and asked for records."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pluggy

from interposer import hookspecs
from interposer._contract.errors import FOREIGN_ERRORS, RecordError, nearest_first
from interposer._validation.records import MOST_RECORDS

_PREFIX = "interposer_"
_MARK = "interposer_impl"  # what ``hookimpl`` leaves on a function
_KNOWN: dict[str, list[str]] = {
    name: list(inspect.signature(getattr(hookspecs, name)).parameters)
    for name in hookspecs.__all__
    if name.startswith(_PREFIX)
}


def register_hooks(manager: pluggy.PluginManager, plugin: Any, name: str) -> list[str]:
    """Add the hooks of an imported plugin, or return what is wrong with them."""
    faults = _check_hooks(plugin)
    if not faults:
        try:
            manager.register(plugin, name=name)
        except (ValueError, pluggy.PluginValidationError) as error:
            faults = [str(error)]  # it goes by another name already, for one
    return faults


def _check_hooks(plugin: Any) -> list[str]:
    marked: list[str] = []
    faults: list[str] = []
    for name, member in _members(plugin):
        options = getattr(member, _MARK, None)
        if options is not None:
            marked.append(name)
            faults += _check_hook(name, member, options)
        elif name in _KNOWN:
            faults.append(f"{name} is not marked with @hookimpl, so that it is never called")
    if not (marked or faults):
        faults = [f"it has no hook; hooks are {', '.join(_KNOWN)}"]
    return faults


def hook_names(plugin: Any) -> tuple[str, ...]:
    """Return the hooks that a plugin implements beside that for its records."""
    found = {name for name, member in _members(plugin) if hasattr(member, _MARK)}
    return tuple(sorted(found - {"interposer_records"}))


def declared_records(manager: pluggy.PluginManager, name: str) -> list[Any]:
    """Return what the plugin ``name`` declares, which may be anything; what it raises passes.

    One more than are allowed at most, so that an endless generator is seen to be too long.

    Raises: RecordError: it returned something else than several records.
    """
    records: list[Any] = []
    for hook in manager.hook.interposer_records.get_hookimpls():
        if hook.plugin_name == name:
            returned: Any = hook.function()
            if not isinstance(returned, Iterable) or isinstance(returned, str):
                raise RecordError(
                    f"interposer_records returned {type(returned).__name__}, "
                    "must return a list of records"
                )
            records += islice(returned, MOST_RECORDS + 1 - len(records))
    return records


def _members(plugin: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(plugin):
        try:
            member = getattr(plugin, name)
        except FOREIGN_ERRORS:  # a property that does not work is no hook
            continue
        if inspect.isroutine(member):
            yield name, member


def _check_hook(name: str, member: Callable[..., Any], options: Any) -> Iterator[str]:
    if name not in _KNOWN:
        nearest = ", ".join(nearest_first(name, _KNOWN)[:3])
        yield f"there is no hook of the name {name!r}; nearest: {nearest}"
        return
    if options.get("wrapper") or options.get("hookwrapper"):
        yield f"{name} is a wrapper, which no hook here takes"
    for parameter in inspect.signature(member).parameters.values():
        various = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        needed = parameter.default is parameter.empty and not various
        if needed and parameter.name not in _KNOWN[name]:
            allowed = ", ".join(_KNOWN[name]) or "none"
            yield f"{name} takes the argument {str(parameter)!r}; it may take: {allowed}"
