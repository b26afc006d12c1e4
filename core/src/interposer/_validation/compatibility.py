"""Whether a plugin fits what is installed: the plugin API, torch and the parts of the SDK."""

from __future__ import annotations

import re
import sys
import traceback
from functools import lru_cache

import importlib_metadata
from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from interposer._contract.errors import FOREIGN_ERRORS, described
from interposer._contract.verdict import Verdict
from interposer._validation.distribution import Distribution

API_VERSION = "1.0"
"""The version of what plugins see: records, hooks and base classes.

The second number grows when something is added, the first when something old stops working.
"""

API_RANGE = f">={API_VERSION},<{int(API_VERSION.partition('.')[0]) + 1}"
"""What a plugin that is written for this version states as ``INTERPOSER_API``."""

_LEADING_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


def check_requirements(dist: Distribution) -> Verdict:
    """Say whether the metadata is usable, and what it requires of torch and the SDK is installed.

    Requirements of extras, and those whose marker does not hold here, do not count.
    """
    if dist.problem:
        return Verdict.refuse(dist.problem)
    for text in dist.requires:
        verdict = _check_requirement(text)
        if not verdict:
            return verdict
    return Verdict.accept()


def check_api(plugin: object, in_code: bool) -> Verdict:
    """Say whether ``INTERPOSER_API`` and ``INTERPOSER_TORCH`` of a plugin fit this process.

    Both are ranges of versions such as ``">=1.0,<2"``. An installed plugin must state the first;
    one that is given in code need not. The local part of a version counts only where a range has
    one, and prereleases count as what they precede.
    """
    try:
        api = getattr(plugin, "INTERPOSER_API", None)
        torch = getattr(plugin, "INTERPOSER_TORCH", None)
    except FOREIGN_ERRORS as error:
        reason = f"reading its INTERPOSER_API raised {described(error)}"
        return Verdict.refuse(reason, traceback.format_exc())
    if api is None and not in_code:
        return Verdict.refuse(
            "it does not state the API that it was built for: "
            f'add the line INTERPOSER_API = "{API_RANGE}" to the plugin'
        )
    if api is not None:
        verdict = _check_range("INTERPOSER_API", api, "the plugin API", API_VERSION)
        if not verdict:
            return verdict
    if torch is not None:
        return _check_range("INTERPOSER_TORCH", torch, "torch", _installed("torch"))
    return Verdict.accept()


def _check_range(label: str, stated: object, subject: str, version: str | None) -> Verdict:
    example = f'a range of versions such as "{API_RANGE}"'
    if type(stated) is not str:  # nor a subclass: what it does when printed is the plugin's code
        kind = type(stated).__name__
        return Verdict.refuse(f"its {label} is of type {kind}, must be {example}")
    try:
        specifiers = SpecifierSet(stated)
    except InvalidSpecifier:
        specifiers = SpecifierSet()
    if not len(specifiers):
        return Verdict.refuse(f"its {label} is {stated!r:.100}, must be {example}")
    if version is None:
        return Verdict.refuse(f"it was built for {subject} {stated}, which is not installed")
    if not _contains(specifiers, version):
        return Verdict.refuse(
            f"it was built for {subject} {stated} ({label}), installed is {version}"
        )
    return Verdict.accept()


def _check_requirement(text: str) -> Verdict:
    found = _LEADING_NAME.match(text)
    name = canonicalize_name(found[1]) if found else ""
    if name and name not in {"torch", "interposer"} and not name.startswith("interposer-"):
        return Verdict.accept()
    try:
        requirement = _parsed(text)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    except (InvalidRequirement, UndefinedEnvironmentName, UndefinedComparison, InvalidVersion):
        return Verdict.refuse(f"its metadata requires {text!r:.100}, which cannot be understood")
    if not applies:
        return Verdict.accept()
    version = _installed(name)
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
def _parsed(text: str) -> Requirement:
    return Requirement(text)


def _installed(name: str) -> str | None:
    """Return the installed version of a distribution, or None without one."""
    try:
        return _read_version(name, tuple(sys.path))
    except importlib_metadata.PackageNotFoundError:
        return None


@lru_cache(maxsize=64)
def _read_version(name: str, path: tuple[str, ...]) -> str:
    # What raises is not remembered, so what is installed later is found. A search takes as long
    # as all other checks of ten plugins.
    return str(importlib_metadata.version(name))
