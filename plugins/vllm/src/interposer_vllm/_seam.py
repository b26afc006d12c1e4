"""Seams: places where vLLM lets itself be extended, and what it must look like there."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from interposer import Verdict
from interposer.errors import described, foreign_errors

__all__ = ["Member", "Seam", "parameters"]


@dataclass(frozen=True, slots=True)
class Member:
    """A function or class of vLLM that is called or overridden, and the parameters it must have.

    Attributes:
        target: ``module:name`` or ``module:class.name``.
        expected: its parameters with defaults and without annotations, such as ``(self, x=None)``.
    """

    target: str
    expected: str

    def load(self) -> Any:
        """Return what ``target`` names.

        Raises: ImportError, AttributeError: vLLM has it no longer.
        """
        module, _, name = self.target.partition(":")
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return found

    def check(self) -> Verdict:
        """Refuse unless ``target`` is there and takes what is expected."""
        try:
            found = parameters(self.load())
        except foreign_errors() as error:
            return Verdict.refuse(f"{self.target} is not there: {described(error)}")
        if found != self.expected:
            return Verdict.refuse(f"{self.target} takes {found}, not {self.expected}")
        return Verdict.accept()


def parameters(function: Callable[..., Any]) -> str:
    """Return the parameters of ``function`` with their kinds and defaults, without annotations."""
    signature = inspect.signature(function)
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One place where vLLM is extended.

    Attributes:
        members: all that is called or overridden there.
        take: extends vLLM, after all members were checked; refuses where another plugin did so.
        stays: names the part of vLLM that runs as ever where the seam is refused.
        needs: seams without which this one does harm; they are taken before.
    """

    name: str
    members: tuple[Member, ...]
    take: Callable[[], Verdict]
    stays: str
    needs: tuple[str, ...] = ()

    def check(self) -> Verdict:
        """Refuse with the first member that is not as expected."""
        verdicts = (member.check() for member in self.members)
        return next((verdict for verdict in verdicts if not verdict), Verdict.accept())
