"""Patches: extensions of vLLM that are applied only if vLLM's signatures are as expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from interposer import Verdict
from interposer.tooling import HostMember

__all__ = ["Patch"]


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
    members: tuple[HostMember, ...]
    apply: Callable[[], Verdict]
    scope: str
    needs: tuple[str, ...] = ()

    def check(self) -> Verdict:
        """Accept the patch if vLLM has all expected members; refuse with the first difference."""
        verdicts = (member.check() for member in self.members)
        return next((verdict for verdict in verdicts if not verdict), Verdict.accept())
