"""The model families of this package, and the base classes for new families.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_models._decoder.family import DecoderFamily
    from interposer_models._decoder.mixture import MixtureFamily, MixtureMLP
    from interposer_models._decoder.prediction_head import (
        HeadNames,
        NextTokenHead,
        PredictionHead,
    )
    from interposer_models._decoder.settings import DecoderSettings
    from interposer_models._encoder_decoder.attention import CrossAttention, EncoderAttention
    from interposer_models._encoder_decoder.blocks import CrossedBlock
    from interposer_models._encoder_decoder.family import EncoderDecoderFamily
    from interposer_models._encoder_decoder.model import EncoderDecoderLM, SourceEncoder
    from interposer_models._families.gpt_oss import GptOss
    from interposer_models._families.granite import Granite
    from interposer_models._families.llama import Llama
    from interposer_models._families.mistral import Mistral
    from interposer_models._families.mixtral import Mixtral
    from interposer_models._families.olmo2 import Olmo2
    from interposer_models._families.phi3 import Phi3
    from interposer_models._families.qwen2 import Qwen2
    from interposer_models._families.qwen3 import Qwen3
    from interposer_models._families.qwen3_moe import Qwen3Moe
    from interposer_models._families.smollm3 import SmolLM3

# fmt: off
__all__ = [
    "CrossAttention", "CrossedBlock", "DecoderFamily", "DecoderSettings", "EncoderAttention",
    "EncoderDecoderFamily", "EncoderDecoderLM", "GptOss", "Granite", "HeadNames", "Llama",
    "Mistral", "Mixtral", "MixtureFamily", "MixtureMLP", "NextTokenHead", "Olmo2", "Phi3",
    "PredictionHead", "Qwen2", "Qwen3", "Qwen3Moe", "SmolLM3", "SourceEncoder",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_models._decoder.family": "DecoderFamily",
        "interposer_models._decoder.mixture": "MixtureFamily MixtureMLP",
        "interposer_models._decoder.prediction_head": "HeadNames NextTokenHead PredictionHead",
        "interposer_models._decoder.settings": "DecoderSettings",
        "interposer_models._encoder_decoder.attention": "CrossAttention EncoderAttention",
        "interposer_models._encoder_decoder.blocks": "CrossedBlock",
        "interposer_models._encoder_decoder.family": "EncoderDecoderFamily",
        "interposer_models._encoder_decoder.model": "EncoderDecoderLM SourceEncoder",
        "interposer_models._families.gpt_oss": "GptOss",
        "interposer_models._families.granite": "Granite",
        "interposer_models._families.llama": "Llama",
        "interposer_models._families.mistral": "Mistral",
        "interposer_models._families.mixtral": "Mixtral",
        "interposer_models._families.olmo2": "Olmo2",
        "interposer_models._families.phi3": "Phi3",
        "interposer_models._families.qwen2": "Qwen2",
        "interposer_models._families.qwen3": "Qwen3",
        "interposer_models._families.qwen3_moe": "Qwen3Moe",
        "interposer_models._families.smollm3": "SmolLM3",
    },
)


def __dir__() -> list[str]:
    return __all__
