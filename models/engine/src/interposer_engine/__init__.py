"""Loading of Hugging Face checkpoints, and text generation with them, on any platform.

Names are loaded on first use, so that the commands print help without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

try:
    from interposer.tooling import lazy_attributes
except ImportError as error:
    import interposer

    raise ImportError(
        f"{error}: 'interposer' is imported from {interposer.__file__}. "
        "Try: rename, remove or take off PYTHONPATH what stands in place of interposer"
    ) from error

if TYPE_CHECKING:
    from interposer_engine._async_engine import AsyncLanguageModel
    from interposer_engine._checkpoint.files import Checkpoint
    from interposer_engine._constrained_decoding.constraints import Compiled
    from interposer_engine._constrained_decoding.limits import ConstraintLimits
    from interposer_engine._distributed.launcher import launched
    from interposer_engine._embedded_input import EmbeddedInput
    from interposer_engine._encoder_features import EncoderFeatures
    from interposer_engine._engine_thread import Generation, QueueFullError
    from interposer_engine._language_model import Completion, Delta, LanguageModel, Stream
    from interposer_engine._loader import load
    from interposer_engine._media import Media
    from interposer_engine._memory_need import MemoryNeed
    from interposer_engine._packed.packing import Packed, pack
    from interposer_engine._plan import Plan
    from interposer_engine._planning import plan
    from interposer_engine._prefix_settings import PrefixCache
    from interposer_engine._quantize.quantizer import quantize
    from interposer_engine._sampling_params import Constraint, SamplingParams
    from interposer_engine._sequence import PromptLogprob
    from interposer_engine._speculation.settings import Speculation
    from interposer_engine._speech.audio import AudioLimits
    from interposer_engine._speech.transcriber import TranscriptionOptions
    from interposer_engine._speech.transcript import (
        Transcript,
        TranscriptSegment,
        TranscriptStream,
    )
    from interposer_engine._tokenizer import TextTokenizer
    from interposer_engine._weight_transfer.protocol import Meeting
    from interposer_engine._weight_transfer.receiver import WeightsFrom
    from interposer_engine._weight_transfer.sender import send_weights
    from interposer_ops.layers.moe.placement import ExpertParallel

__all__ = [
    "AsyncLanguageModel",
    "AudioLimits",
    "Checkpoint",
    "Compiled",
    "Completion",
    "Constraint",
    "ConstraintLimits",
    "Delta",
    "EmbeddedInput",
    "EncoderFeatures",
    "ExpertParallel",
    "Generation",
    "LanguageModel",
    "Media",
    "Meeting",
    "MemoryNeed",
    "Packed",
    "Plan",
    "PrefixCache",
    "PromptLogprob",
    "QueueFullError",
    "SamplingParams",
    "Speculation",
    "Stream",
    "TextTokenizer",
    "Transcript",
    "TranscriptSegment",
    "TranscriptStream",
    "TranscriptionOptions",
    "WeightsFrom",
    "launched",
    "load",
    "pack",
    "plan",
    "quantize",
    "send_weights",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_engine._async_engine": "AsyncLanguageModel",
        "interposer_engine._checkpoint.files": "Checkpoint",
        "interposer_engine._constrained_decoding.constraints": "Compiled",
        "interposer_engine._constrained_decoding.limits": "ConstraintLimits",
        "interposer_engine._distributed.launcher": "launched",
        "interposer_engine._embedded_input": "EmbeddedInput",
        "interposer_engine._encoder_features": "EncoderFeatures",
        "interposer_engine._engine_thread": "Generation QueueFullError",
        "interposer_engine._language_model": "Completion Delta LanguageModel Stream",
        "interposer_engine._loader": "load",
        "interposer_engine._media": "Media",
        "interposer_engine._memory_need": "MemoryNeed",
        "interposer_engine._planning": "plan",
        "interposer_engine._packed.packing": "Packed pack",
        "interposer_engine._plan": "Plan",
        "interposer_engine._prefix_settings": "PrefixCache",
        "interposer_engine._quantize.quantizer": "quantize",
        "interposer_engine._sampling_params": "Constraint SamplingParams",
        "interposer_engine._sequence": "PromptLogprob",
        "interposer_engine._speculation.settings": "Speculation",
        "interposer_engine._speech.audio": "AudioLimits",
        "interposer_engine._speech.transcriber": "TranscriptionOptions",
        "interposer_engine._speech.transcript": "Transcript TranscriptSegment TranscriptStream",
        "interposer_engine._tokenizer": "TextTokenizer",
        "interposer_engine._weight_transfer.protocol": "Meeting",
        "interposer_engine._weight_transfer.receiver": "WeightsFrom",
        "interposer_engine._weight_transfer.sender": "send_weights",
        "interposer_ops.layers.moe.placement": "ExpertParallel",
    },
)


def __dir__() -> list[str]:
    return __all__
