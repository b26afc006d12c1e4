"""Patches: extensions of vLLM that are applied only if vLLM's signatures are as expected."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from interposer import Verdict
from interposer.errors import described, foreign_errors

__all__ = ["Member", "Patch", "parameters"]


@dataclass(frozen=True, slots=True)
class Member:
    """A function or class of vLLM that a patch calls or overrides, with the expected parameters.

    Attributes:
        target: ``module:name`` or ``module:class.name``.
        expected: the parameters with defaults, without annotations, such as ``(self, x=None)``.
    """

    target: str
    expected: str

    def load(self) -> Any:
        """Import and return the object that ``target`` names.

        Raises: ImportError, AttributeError: this version of vLLM lacks the object.
        """
        module, _, name = self.target.partition(":")
        member: Any = importlib.import_module(module)
        for part in name.split("."):
            member = getattr(member, part)
        return member

    def check(self) -> Verdict:
        """Refuse the patch if ``target`` is missing or has unexpected parameters."""
        try:
            signature = parameters(self.load())
        except foreign_errors() as error:
            return Verdict.refuse(f"{self.target} is missing: {described(error)}")
        if signature != self.expected:
            return Verdict.refuse(f"{self.target} takes {signature}, not {self.expected}")
        return Verdict.accept()


def parameters(function: Callable[..., Any]) -> str:
    """Return the parameters of ``function`` as text: kinds and defaults, no annotations."""
    signature = inspect.signature(function)
    unannotated = [
        p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()
    ]
    return str(signature.replace(parameters=unannotated, return_annotation=inspect.Signature.empty))


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """An extension of vLLM, with the members of vLLM that the extension relies on.

    Attributes:
        members: everything in vLLM that the patch calls or overrides.
        apply: extends vLLM after all members were checked; refuses if another plugin has extended
            the same class or entry.
        scope: the part of vLLM that runs unchanged if the patch is refused.
        needs: names of patches that must be applied before, because this patch alone does harm.
    """

    name: str
    members: tuple[Member, ...]
    apply: Callable[[], Verdict]
    scope: str
    needs: tuple[str, ...] = ()

    def check(self) -> Verdict:
        """Accept the patch if vLLM has all expected members; refuse with the first difference."""
        verdicts = (member.check() for member in self.members)
        return next((verdict for verdict in verdicts if not verdict), Verdict.accept())
