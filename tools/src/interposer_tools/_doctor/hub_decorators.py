"""The check that transformers replaces layers by kernels of the hub; it says nothing if not.

Its layers are marked by decorators that do nothing where the package ``kernels`` is missing or of a
version that it does not take.

Source: transformers 5.23, ``integrations/hub_kernels.py`` (the decorators, ``USE_HUB_KERNELS``) and
``utils/import_utils.py`` (``KERNELS_MIN_VERSION``, ``KERNELS_MAX_VERSION``).
"""

from __future__ import annotations

import ast
from pathlib import Path

import importlib_metadata
from packaging.specifiers import SpecifierSet

from interposer import Verdict
from interposer.tooling import variables

SUBJECT = "kernels of the hub"
_TRUE = {"1", "ON", "YES", "TRUE"}
_NAMES = "KERNELS_MIN_VERSION", "KERNELS_MAX_VERSION"


def judge_hub_decorators() -> Verdict | None:
    """Return whether they work, None where there is no transformers, or one without them."""
    try:
        package = importlib_metadata.distribution("transformers")
    except importlib_metadata.PackageNotFoundError:
        return None
    bounds = _bounds(Path(str(package.locate_file("transformers"))) / "utils" / "import_utils.py")
    if bounds is None:
        return None
    taken = f">={bounds[0]},<{bounds[1]}"
    lead = f"transformers {package.version}"
    silent = "its layers stay as they are, whatever is mapped for them"
    try:
        found = importlib_metadata.version("kernels")
    except importlib_metadata.PackageNotFoundError:
        return Verdict.refuse(
            f"{lead} takes the package kernels {taken}, which is not installed, so {silent}. "
            f"Try: pip install 'kernels{taken}'"
        )
    if not SpecifierSet(taken).contains(found, prereleases=True):
        return Verdict.refuse(
            f"{lead} takes kernels {taken}, found {found}, so {silent}. "
            f"Try: pip install 'kernels{taken}'"
        )
    wanted = variables().get("USE_HUB_KERNELS", "YES")
    if wanted.upper() not in _TRUE:
        return Verdict.refuse(
            f"USE_HUB_KERNELS is {wanted!r}, so of {lead} {silent}. Try: unset USE_HUB_KERNELS"
        )
    return Verdict.accept(f"{lead} takes those of kernels {found} with use_kernels=True")


def _bounds(source: Path) -> tuple[str, str] | None:
    """Return the versions that it takes, from its source: to import it takes seconds."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    found: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(str(value))) if name in _NAMES:
                found[name] = value
    return (found[_NAMES[0]], found[_NAMES[1]]) if found.keys() >= {*_NAMES} else None
