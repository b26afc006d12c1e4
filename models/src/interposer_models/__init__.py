"""Load or adapt models of Hugging Face and run them on the platform in force.

Every name is loaded on first use, so that the commands print help without torch.
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
    from interposer_models._adapt.handle import Adapted, adapt
    from interposer_models._adapt.paging import language_model
    from interposer_models._adapt.place import Place
    from interposer_models._asynchronous.errors import QueueFullError
    from interposer_models._asynchronous.generation import Generation
    from interposer_models._asynchronous.language_model import AsyncLanguageModel
    from interposer_models._checkpoint.checkpoint import Checkpoint
    from interposer_models._constraint import Constraint
    from interposer_models._decoder.decoder import CausalLM
    from interposer_models._encoder.encoder import Encoder, load_encoder
    from interposer_models._engine.constraint_limits import ConstraintLimits
    from interposer_models._engine.constraints import Compiled
    from interposer_models._engine.prefix_settings import PrefixCache
    from interposer_models._engine.sampling_params import SamplingParams
    from interposer_models._engine.sequence import PromptLogprob
    from interposer_models._language_model import LanguageModel
    from interposer_models._loader import load, plan
    from interposer_models._packed.packing import Packed, pack
    from interposer_models._parallel.launching import launched
    from interposer_models._plan import Plan
    from interposer_models._quantizing.quantizer import quantize
    from interposer_models._speculation.settings import Speculation
    from interposer_models._stream import Completion, Delta, Stream
    from interposer_models._tokenizer import TextTokenizer
    from interposer_models._transfer.meeting import Meeting
    from interposer_models._transfer.receiver import WeightsFrom
    from interposer_models._transfer.sender import send_weights
    from interposer_ops.layers.expert_placement import ExpertParallel

__all__ = [
    "Adapted",
    "AsyncLanguageModel",
    "CausalLM",
    "Checkpoint",
    "Compiled",
    "Completion",
    "Constraint",
    "ConstraintLimits",
    "Delta",
    "Encoder",
    "ExpertParallel",
    "Generation",
    "LanguageModel",
    "Meeting",
    "Packed",
    "Place",
    "Plan",
    "PrefixCache",
    "PromptLogprob",
    "QueueFullError",
    "SamplingParams",
    "Speculation",
    "Stream",
    "TextTokenizer",
    "WeightsFrom",
    "adapt",
    "language_model",
    "launched",
    "load",
    "load_encoder",
    "pack",
    "plan",
    "quantize",
    "send_weights",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_models._adapt.handle": "Adapted adapt",
        "interposer_models._adapt.paging": "language_model",
        "interposer_models._adapt.place": "Place",
        "interposer_models._asynchronous.errors": "QueueFullError",
        "interposer_models._asynchronous.generation": "Generation",
        "interposer_models._asynchronous.language_model": "AsyncLanguageModel",
        "interposer_models._checkpoint.checkpoint": "Checkpoint",
        "interposer_models._constraint": "Constraint",
        "interposer_models._decoder.decoder": "CausalLM",
        "interposer_models._encoder.encoder": "Encoder load_encoder",
        "interposer_models._engine.constraint_limits": "ConstraintLimits",
        "interposer_models._engine.constraints": "Compiled",
        "interposer_models._engine.prefix_settings": "PrefixCache",
        "interposer_models._engine.sampling_params": "SamplingParams",
        "interposer_models._engine.sequence": "PromptLogprob",
        "interposer_models._language_model": "LanguageModel",
        "interposer_models._loader": "load plan",
        "interposer_models._packed.packing": "Packed pack",
        "interposer_models._parallel.launching": "launched",
        "interposer_models._plan": "Plan",
        "interposer_models._quantizing.quantizer": "quantize",
        "interposer_models._speculation.settings": "Speculation",
        "interposer_models._stream": "Completion Delta Stream",
        "interposer_models._tokenizer": "TextTokenizer",
        "interposer_models._transfer.meeting": "Meeting",
        "interposer_models._transfer.receiver": "WeightsFrom",
        "interposer_models._transfer.sender": "send_weights",
        "interposer_ops.layers.expert_placement": "ExpertParallel",
    },
)


def __dir__() -> list[str]:
    return __all__
