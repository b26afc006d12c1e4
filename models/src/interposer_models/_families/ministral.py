"""Ministral: Mistral with full attention in some layers.

Source: mistral.ai/news/ministraux.
"""

from __future__ import annotations

from typing import ClassVar

from interposer_models._decoder.settings import WindowTokens
from interposer_models._families.mistral import Mistral


class Ministral(Mistral):
    """Ministral.

    ``layer_types`` names the layers with a sliding window; if absent, all layers have one.
    """

    reads_layer_types: ClassVar[bool] = True
    sliding_window: WindowTokens | None = 4096
