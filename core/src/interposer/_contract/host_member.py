"""Members of a host engine that a plugin calls, overrides or patches, with their signatures."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from interposer._contract.errors import described, foreign_errors
from interposer._contract.verdict import Verdict

__all__ = ["HostMember"]


@dataclass(frozen=True, slots=True)
class HostMember:
    """A function or class of a host that a plugin calls or overrides, with the expected parameters.

    ``check`` compares the member when the plugin starts. ``interposer seams`` reads the same
    declaration in the plugin's source, and compares it with versions that are not installed.

    Attributes:
        target: ``module:name`` or ``module:class.name``.
        expected: the parameters with defaults, without annotations, such as ``(self, x=None)``.
    """

    target: str
    expected: str

    def load(self) -> Any:
        """Import and return the object that ``target`` names.

        Raises: ImportError, AttributeError: the installed version of the host lacks the object.
        """
        module, _, name = self.target.partition(":")
        member: Any = importlib.import_module(module)
        for part in name.split("."):
            member = getattr(member, part)
        return member

    def check(self) -> Verdict:
        """Refuse if ``target`` is missing in the installed host or has unexpected parameters."""
        try:
            parameters = _parameters(self.load())
        except foreign_errors() as error:
            return Verdict.refuse(f"{self.target} is missing: {described(error)}")
        if parameters != self.expected:
            return Verdict.refuse(f"{self.target} takes {parameters}, not {self.expected}")
        return Verdict.accept()


def _parameters(function: Callable[..., Any]) -> str:
    """Return the parameters of ``function`` as text: kinds and defaults, no annotations."""
    signature = inspect.signature(function)
    unannotated = [
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=unannotated, return_annotation=inspect.Signature.empty))
