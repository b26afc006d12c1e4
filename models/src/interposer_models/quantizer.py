"""Quantization by interposer for models that transformers loads.

Importing this module registers the method ``"interposer"``::

    from interposer_models.quantizer import InterposerConfig

    AutoModelForCausalLM.from_pretrained(path, quantization_config=InterposerConfig("int8"))
"""

from __future__ import annotations

from interposer_models._transformers_quantizer.config import InterposerConfig
from interposer_models._transformers_quantizer.quantizer import register

__all__ = ["InterposerConfig"]

register()
