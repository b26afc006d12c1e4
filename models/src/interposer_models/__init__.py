"""Model families, and the decoder classes from which they are built.

Names are loaded on first use.
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
from interposer_models._moved import moved_names

if TYPE_CHECKING:
    from interposer_models._decoder.decoder import CausalLM

__all__ = ["CausalLM"]

_load = lazy_attributes(__name__, {"interposer_models._decoder.decoder": "CausalLM"})
_load_moved = moved_names(
    __name__,
    {
        "interposer_adapt": "Adapted Encoder Place adapt language_model load_encoder",
        "interposer_engine": (
            "AsyncLanguageModel Checkpoint Compiled Completion Constraint ConstraintLimits Delta "
            "ExpertParallel Generation LanguageModel Meeting Packed Plan PrefixCache PromptLogprob "
            "QueueFullError SamplingParams Speculation Stream TextTokenizer WeightsFrom launched "
            "load pack plan quantize send_weights"
        ),
    },
)


def __getattr__(name: str) -> object:
    return _load(name) if name in __all__ else _load_moved(name)


def __dir__() -> list[str]:
    return __all__
