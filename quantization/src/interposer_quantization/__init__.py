"""Quantization schemes: checkpoint formats, and quantization of float weights during loading.

Every name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_quantization._mxfp4.experts import Mxfp4Experts
    from interposer_quantization._settings_model import SettingsModel
    from interposer_quantization._weights.fused_layers import stored_alike

__all__ = [
    "Mxfp4Experts",
    "SettingsModel",
    "stored_alike",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_quantization._mxfp4.experts": "Mxfp4Experts",
        "interposer_quantization._settings_model": "SettingsModel",
        "interposer_quantization._weights.fused_layers": "stored_alike",
    },
)


def __dir__() -> list[str]:
    return __all__
