"""OLMo 3: OLMo 2 with windows in three of four layers; only full layers have long-context angles.

Source: arXiv:2512.13961.
"""

from __future__ import annotations

from typing import ClassVar

from interposer_models._decoder.rotary_fields import LayerTypeBases
from interposer_models._decoder.settings import RopeBase, WindowTokens
from interposer_models._families.olmo2 import Olmo2


class Olmo3(Olmo2):
    """Settings of OLMo 3, which also build the decoder."""

    reads_layer_types: ClassVar[bool] = True
    # Only full-attention layers may scale; the base is the same.
    layer_type_bases: ClassVar[LayerTypeBases | None] = LayerTypeBases(500000.0, 500000.0)
    rope_theta: RopeBase = 500000.0
    sliding_window: WindowTokens | None = 4096

    def slides(self, index: int) -> bool:
        """Return True for all layers but every fourth."""
        return (index + 1) % 4 != 0
