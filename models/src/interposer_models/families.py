"""Model families, and the base classes for deriving further families.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_models._decoder.family import DecoderFamily
    from interposer_models._decoder.moe import MixtureFamily, MixtureMLP
    from interposer_models._decoder.mtp_head import HeadNames, NextTokenHead, PredictionHead
    from interposer_models._decoder.settings import DecoderSettings
    from interposer_models._encoder_decoder import (
        CrossAttention,
        CrossedBlock,
        EncoderAttention,
        EncoderDecoderFamily,
        EncoderDecoderLM,
        SourceEncoder,
    )
    from interposer_models._families.gpt_oss import GptOss
    from interposer_models._families.granite import Granite
    from interposer_models._families.llama import Llama, Mistral, Mixtral, SmolLM3
    from interposer_models._families.olmo import Olmo2
    from interposer_models._families.phi3 import Phi3
    from interposer_models._families.qwen import Qwen2, Qwen3, Qwen3Moe

__all__ = [
    "CrossAttention",
    "CrossedBlock",
    "DecoderFamily",
    "DecoderSettings",
    "EncoderAttention",
    "EncoderDecoderFamily",
    "EncoderDecoderLM",
    "GptOss",
    "Granite",
    "HeadNames",
    "Llama",
    "Mistral",
    "Mixtral",
    "MixtureFamily",
    "MixtureMLP",
    "NextTokenHead",
    "Olmo2",
    "Phi3",
    "PredictionHead",
    "Qwen2",
    "Qwen3",
    "Qwen3Moe",
    "SmolLM3",
    "SourceEncoder",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_models._decoder.family": "DecoderFamily",
        "interposer_models._decoder.moe": "MixtureFamily MixtureMLP",
        "interposer_models._decoder.mtp_head": "HeadNames NextTokenHead PredictionHead",
        "interposer_models._decoder.settings": "DecoderSettings",
        "interposer_models._encoder_decoder": (
            "CrossAttention CrossedBlock EncoderAttention EncoderDecoderFamily "
            "EncoderDecoderLM SourceEncoder"
        ),
        "interposer_models._families.gpt_oss": "GptOss",
        "interposer_models._families.granite": "Granite",
        "interposer_models._families.llama": "Llama Mistral Mixtral SmolLM3",
        "interposer_models._families.olmo": "Olmo2",
        "interposer_models._families.phi3": "Phi3",
        "interposer_models._families.qwen": "Qwen2 Qwen3 Qwen3Moe",
    },
)


def __dir__() -> list[str]:
    return __all__
