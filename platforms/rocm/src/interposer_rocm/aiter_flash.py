"""Decoder attention by AITER's flash attention for sequences of any length.

Its own way to read pages ends the process on some GPUs (ROCm/aiter, issues 4455 and 4456), so
that what is read is copied out of the cache first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from interposer import AttentionSpec, Capability, Verdict
from interposer_rocm.aiter_library import FLASH, function, require
from interposer_rocm.aiter_package import judge_flash
from interposer_rocm.copied_keys import CopiedKeysBackend

__all__ = ["AiterFlashBackend"]


class AiterFlashBackend(CopiedKeysBackend):
    """Windows and softcapped logits are the function's own."""

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        """Accept what ``judge_flash`` accepts."""
        return judge_flash(spec, capability)

    def _found(self) -> Callable[..., Any]:
        require(FLASH)
        return function(FLASH)

    def _options(self) -> dict[str, Any]:
        return {"logits_soft_cap": self.spec.softcap or 0.0}
