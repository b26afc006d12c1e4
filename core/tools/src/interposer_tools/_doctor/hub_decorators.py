"""Check whether transformers can replace layers by kernels from Hugging Face's kernel hub.

Decorators mark such layers in transformers. Without a suitable version of the package ``kernels``,
the decorators do nothing and give no warning.

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
# Values of USE_HUB_KERNELS that transformers takes for true.
_TRUE = {"1", "ON", "YES", "TRUE"}
_NAMES = "KERNELS_MIN_VERSION", "KERNELS_MAX_VERSION"


def judge_hub_decorators() -> Verdict | None:
    """Judge whether the decorators work; None without transformers or with an old version."""
    try:
        package = importlib_metadata.distribution("transformers")
    except importlib_metadata.PackageNotFoundError:
        return None
    bounds = _bounds(Path(str(package.locate_file("transformers"))) / "utils" / "import_utils.py")
    if bounds is None:
        return None
    supported = f">={bounds[0]},<{bounds[1]}"
    lead = f"transformers {package.version}"
    consequence = "no layer of a model is replaced, even if a kernel is mapped to it"
    try:
        installed = importlib_metadata.version("kernels")
    except importlib_metadata.PackageNotFoundError:
        return Verdict.refuse(
            f"{lead} needs the package kernels {supported}, which is not installed, so "
            f"{consequence}. Try: pip install 'kernels{supported}'"
        )
    if not SpecifierSet(supported).contains(installed, prereleases=True):
        return Verdict.refuse(
            f"{lead} needs kernels {supported}, found {installed}, so {consequence}. "
            f"Try: pip install 'kernels{supported}'"
        )
    setting = variables().get("USE_HUB_KERNELS", "YES")
    if setting.upper() not in _TRUE:
        return Verdict.refuse(
            f"USE_HUB_KERNELS is {setting!r}, so in {lead} {consequence}. "
            "Try: unset USE_HUB_KERNELS"
        )
    return Verdict.accept(f"{lead} uses them through kernels {installed} with use_kernels=True")


def _bounds(source: Path) -> tuple[str, str] | None:
    """Read the supported versions of ``kernels`` from the source; an import would take seconds."""
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    versions: dict[str, str] = {}
    for node in tree.body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(str(value))) if name in _NAMES:
                versions[name] = value
    return (versions[_NAMES[0]], versions[_NAMES[1]]) if versions.keys() >= {*_NAMES} else None
