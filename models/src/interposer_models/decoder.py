"""The decoder from which model families are built, for engines that run such models.

Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_models._decoder.attention import SharedCacheAttention
    from interposer_models._decoder.chunked_attention import ChunkedBackend
    from interposer_models._decoder.decoder import CACHED_LAYERS, Decoder, HiddenStates
    from interposer_models._decoder.embedded_rows import EmbeddedRows
    from interposer_models._decoder.family import DecoderFamily, cache_note
    from interposer_models._decoder.mla import LatentAttention, LatentProjection, LatentSizes
    from interposer_models._decoder.moe import UngatedExperts
    from interposer_models._decoder.mtp_head import PredictionHead
    from interposer_models._decoder.recurrent import RecurrentLayer
    from interposer_models._decoder.settings import DecoderSettings, Positive
    from interposer_models._encoder_decoder import EncoderInputBatch
    from interposer_models._family_choice import (
        UnknownDecoderError,
        checked_model,
        choose_family,
        family_errors,
        with_location,
    )

__all__ = [
    "CACHED_LAYERS",
    "ChunkedBackend",
    "Decoder",
    "DecoderFamily",
    "DecoderSettings",
    "EmbeddedRows",
    "EncoderInputBatch",
    "HiddenStates",
    "LatentAttention",
    "LatentProjection",
    "LatentSizes",
    "Positive",
    "PredictionHead",
    "RecurrentLayer",
    "SharedCacheAttention",
    "UngatedExperts",
    "UnknownDecoderError",
    "cache_note",
    "checked_model",
    "choose_family",
    "family_errors",
    "with_location",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_models._decoder.attention": "SharedCacheAttention",
        "interposer_models._decoder.chunked_attention": "ChunkedBackend",
        "interposer_models._decoder.decoder": "CACHED_LAYERS Decoder HiddenStates",
        "interposer_models._decoder.embedded_rows": "EmbeddedRows",
        "interposer_models._decoder.family": "DecoderFamily cache_note",
        "interposer_models._decoder.mla": "LatentAttention LatentProjection LatentSizes",
        "interposer_models._decoder.moe": "UngatedExperts",
        "interposer_models._decoder.mtp_head": "PredictionHead",
        "interposer_models._decoder.recurrent": "RecurrentLayer",
        "interposer_models._decoder.settings": "DecoderSettings Positive",
        "interposer_models._encoder_decoder": "EncoderInputBatch",
        "interposer_models._family_choice": (
            "UnknownDecoderError checked_model choose_family family_errors with_location"
        ),
    },
)


def __dir__() -> list[str]:
    return __all__
