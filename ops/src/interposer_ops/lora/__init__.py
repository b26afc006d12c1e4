"""Ops of low-rank adapters (LoRA).

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.lora._lora import lora_expand, lora_shrink

# fmt: off
__all__ = [
    "lora_expand", "lora_shrink",
]
# fmt: on

__getattr__ = lazy_attributes(__name__, {"interposer_ops.lora._lora": "lora_expand lora_shrink"})


def __dir__() -> list[str]:
    return __all__
