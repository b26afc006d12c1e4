"""Quantization by interposer for models that transformers loads.

Importing this module registers the method ``"interposer"``::

    from interposer_adapt.quantizer import InterposerConfig

    AutoModelForCausalLM.from_pretrained(path, quantization_config=InterposerConfig("int8"))
"""

from __future__ import annotations

from interposer_adapt._transformers_quantizer import InterposerConfig, register

__all__ = ["InterposerConfig"]

register()
