"""Compatibility of a plugin: requirements, declared plugin API, and hooks."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import importlib_metadata
import pluggy
from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from interposer import hookspecs
from interposer._contract.errors import (
    RecordError,
    described,
    foreign_errors,
    nearest_first,
    traced,
)
from interposer._contract.verdict import Verdict
from interposer._validation.distribution import Distribution
from interposer._validation.records import MOST_RECORDS

_RANGE_LIMIT = 300

API_VERSION = "1.0"
"""The version of the plugin API: records, hooks and base classes.

The second number grows with additions, the first with incompatible changes.
"""

API_RANGE = f">={API_VERSION},<{int(API_VERSION.partition('.')[0]) + 1}"
"""The ``INTERPOSER_API`` of a plugin that targets this version."""

_MARK = "interposer_impl"  # the attribute that ``hookimpl`` sets on a function
_KNOWN: dict[str, list[str]] = {
    name: list(inspect.signature(getattr(hookspecs, name)).parameters)
    for name in hookspecs.__all__
    if name.startswith("interposer_")
}
_LEADING_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


def check_requirements(dist: Distribution) -> Verdict:
    """Check a distribution's metadata, and that the required torch and SDK are installed.

    Requirements of extras, and with a marker that is false here, are ignored.
    """
    if dist.problem:
        return Verdict.refuse(dist.problem)
    verdicts = map(_check_requirement, dist.requires)
    return next((verdict for verdict in verdicts if not verdict), Verdict.accept())


def check_api(plugin: object, in_code: bool) -> Verdict:
    """Check that ``INTERPOSER_API`` and ``INTERPOSER_TORCH`` of a plugin fit this process.

    Both are version ranges such as ``">=1.0,<2"``. An installed plugin must state the first; a
    plugin registered in code need not. A version's local part matters only if the range has one
    too, and prereleases are allowed.
    """
    try:
        api = getattr(plugin, "INTERPOSER_API", None)
        torch = getattr(plugin, "INTERPOSER_TORCH", None)
    except foreign_errors() as error:
        reason = f"reading its INTERPOSER_API raised {described(error)}"
        return Verdict.refuse(reason, traced(error))
    if api is None and not in_code:
        return Verdict.refuse(
            "it does not state the API that it was built for: "
            f'add the line INTERPOSER_API = "{API_RANGE}" to the plugin'
        )
    verdict = Verdict.accept()
    if api is not None:
        verdict = _check_range("INTERPOSER_API", api, "the plugin API", API_VERSION)
    if verdict and torch is not None:
        verdict = _check_range("INTERPOSER_TORCH", torch, "torch", installed_version("torch"))
    return verdict


def _check_range(label: str, version_range: object, subject: str, version: str | None) -> Verdict:
    example = f'a range of versions such as "{API_RANGE}"'
    if (
        type(version_range) is not str
    ):  # not isinstance: printing a subclass would run the plugin's code
        kind = type(version_range).__name__
        return Verdict.refuse(f"its {label} is of type {kind}, must be {example}")
    try:
        # Parsing time grows with the length, so an overlong range counts as invalid.
        specifiers = SpecifierSet(version_range if len(version_range) <= _RANGE_LIMIT else "")
    except InvalidSpecifier:
        specifiers = SpecifierSet()
    if not len(specifiers):
        return Verdict.refuse(f"its {label} is {version_range!r:.100}, must be {example}")
    if version is None:
        return Verdict.refuse(f"it was built for {subject} {version_range}, which is not installed")
    if not _contains(specifiers, version):
        return Verdict.refuse(
            f"it was built for {subject} {version_range} ({label}), installed is {version}"
        )
    return Verdict.accept()


def _check_requirement(text: str) -> Verdict:
    match = _LEADING_NAME.match(text)
    name = canonicalize_name(match[1]) if match else ""
    # Other requirements are pip's business; parsing them all would take time.
    if name and name not in {"torch", "interposer"} and not name.startswith("interposer-"):
        return Verdict.accept()
    try:
        requirement = _parse_requirement(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    except (UndefinedEnvironmentName, UndefinedComparison, ValueError, RecursionError):
        return Verdict.refuse(f"its metadata requires {text!r:.100}, which cannot be understood")
    if not applies:
        return Verdict.accept()
    version = installed_version(name)
    if version is None:
        return Verdict.refuse(f"it requires {requirement}, which is not installed")
    if not _contains(requirement.specifier, version):
        return Verdict.refuse(f"it requires {requirement}, installed is {version}")
    return Verdict.accept()


def _contains(specifiers: SpecifierSet, version: str) -> bool:
    try:
        return specifiers.contains(Version(version), prereleases=True)
    except InvalidVersion:
        return not len(specifiers)


@lru_cache(maxsize=1024)
def _parse_requirement(text: str) -> Requirement:
    return Requirement(text)


def installed_version(name: str) -> str | None:
    """Return the installed version of a distribution, or None without one."""
    try:
        # The path is part of the cache key, because it decides which distributions are visible.
        return _read_version(name, tuple(sys.path))
    except importlib_metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=64)
def _read_version(name: str, path: tuple[str, ...]) -> str:
    # Cached because a search takes as long as all other checks of ten plugins. Exceptions are not
    # cached, so a distribution that is installed later is found.
    return str(importlib_metadata.version(name))


def register_hooks(manager: pluggy.PluginManager, plugin: Any, name: str) -> list[str]:
    """Add the hooks of an imported plugin, or return the hooks' faults."""
    has_hooks = False
    faults: list[str] = []
    for label, member in _members(plugin):
        options = getattr(member, _MARK, None)
        if options is not None:
            has_hooks = True
            faults += _check_hook(label, member, options)
        elif label in _KNOWN:
            faults.append(f"{label} is not marked with @hookimpl, so it is never called")
    if not (has_hooks or faults):
        faults = ["it has no hook, such as interposer_records; `interposer.hookspecs` has all"]
    if not faults:
        try:
            manager.register(plugin, name=name)
        except (ValueError, pluggy.PluginValidationError) as error:
            faults = [str(error)]  # for example, it is registered under another name
    return faults


def hook_names(plugin: Any) -> tuple[str, ...]:
    """Return the names of a plugin's hooks, except ``interposer_records``."""
    names = {name for name, member in _members(plugin) if hasattr(member, _MARK)}
    return tuple(sorted(names - {"interposer_records"}))


def declared_records(manager: pluggy.PluginManager, name: str) -> list[Any]:
    """Return the unchecked records that plugin ``name`` declares; its exceptions propagate.

    At most one object more than the limit is read, so that an endless generator is detected.

    Raises: RecordError: the hook returned something other than an iterable of records.
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
            # One more than allowed, so that the caller sees that there are too many.
            records += islice(returned, MOST_RECORDS + 1 - len(records))
    return records


def _members(plugin: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in dir(plugin):
        try:
            member = getattr(plugin, name)
        except foreign_errors():  # a broken property is not a hook
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
