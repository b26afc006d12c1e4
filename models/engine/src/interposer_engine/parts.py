"""Parts of the engine, for distributions that run their own models in the engine.

Most programs need only :func:`interposer_engine.load`. Names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_engine._batch import StepBatch
    from interposer_engine._checkpoint.files import read_json
    from interposer_engine._checkpoint.opening import (
        config_source,
        download_weights,
        open_folder,
        tokenizer_of,
    )
    from interposer_engine._checkpoint.tensors import unplaced_tensor_error
    from interposer_engine._checkpoint.weight_check import WeightCheck
    from interposer_engine._checkpoint.weights import Weights
    from interposer_engine._closed_model import ClosedModel
    from interposer_engine._embedded_input import PromptTokens, num_tokens
    from interposer_engine._engine import Engine
    from interposer_engine._generation_config import GenerationSettings, end_token_ids, stop_tokens
    from interposer_engine._input_encoder import InputEncoder, MeasurableEncoder
    from interposer_engine._kv_cache import CacheGroup, CacheShape, PagedLayer
    from interposer_engine._kv_cache_budget import (
        CacheBudget,
        check_cache,
        check_sizes,
        unmeasured_budget,
    )
    from interposer_engine._load_options import DEFAULT_MAX_SEQUENCES, DEFAULT_MAX_STEP_TOKENS
    from interposer_engine._locks import FairLock
    from interposer_engine._pages import PagePool
    from interposer_engine._plan import compute_dtype
    from interposer_engine._quantize.calibration import decoder_of
    from interposer_engine._quantize.settings import TRANSFORMERS_METHOD, quantization_settings
    from interposer_engine._runner import Runner
    from interposer_engine._sampling import (
        SamplingState,
        is_listing,
        non_finite,
        penalties_of,
        sampling_batch,
    )
    from interposer_engine._scheduler import Chunk
    from interposer_engine._sequence import TokenSequence
    from interposer_engine._speech.audio import read_audio
    from interposer_engine._speech.features import LogMel
    from interposer_engine._speech.rules import TranscriptRules
    from interposer_engine._tokenizer import MissingTokenizer

__all__ = [
    "DEFAULT_MAX_SEQUENCES",
    "DEFAULT_MAX_STEP_TOKENS",
    "TRANSFORMERS_METHOD",
    "CacheBudget",
    "CacheGroup",
    "CacheShape",
    "Chunk",
    "ClosedModel",
    "Engine",
    "FairLock",
    "GenerationSettings",
    "InputEncoder",
    "LogMel",
    "MeasurableEncoder",
    "MissingTokenizer",
    "PagePool",
    "PagedLayer",
    "PromptTokens",
    "Runner",
    "SamplingState",
    "StepBatch",
    "TokenSequence",
    "TranscriptRules",
    "WeightCheck",
    "Weights",
    "check_cache",
    "check_sizes",
    "compute_dtype",
    "config_source",
    "decoder_of",
    "download_weights",
    "end_token_ids",
    "is_listing",
    "non_finite",
    "num_tokens",
    "open_folder",
    "penalties_of",
    "quantization_settings",
    "read_audio",
    "read_json",
    "sampling_batch",
    "stop_tokens",
    "tokenizer_of",
    "unmeasured_budget",
    "unplaced_tensor_error",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_engine._batch": "StepBatch",
        "interposer_engine._checkpoint.files": "read_json",
        "interposer_engine._checkpoint.opening": (
            "config_source open_folder tokenizer_of download_weights"
        ),
        "interposer_engine._checkpoint.tensors": "unplaced_tensor_error",
        "interposer_engine._checkpoint.weight_check": "WeightCheck",
        "interposer_engine._checkpoint.weights": "Weights",
        "interposer_engine._closed_model": "ClosedModel",
        "interposer_engine._embedded_input": "PromptTokens num_tokens",
        "interposer_engine._engine": "Engine",
        "interposer_engine._generation_config": "GenerationSettings end_token_ids stop_tokens",
        "interposer_engine._input_encoder": "InputEncoder MeasurableEncoder",
        "interposer_engine._kv_cache": "CacheGroup CacheShape PagedLayer",
        "interposer_engine._kv_cache_budget": (
            "CacheBudget check_cache check_sizes unmeasured_budget"
        ),
        "interposer_engine._load_options": "DEFAULT_MAX_SEQUENCES DEFAULT_MAX_STEP_TOKENS",
        "interposer_engine._locks": "FairLock",
        "interposer_engine._pages": "PagePool",
        "interposer_engine._plan": "compute_dtype",
        "interposer_engine._quantize.calibration": "decoder_of",
        "interposer_engine._quantize.settings": "TRANSFORMERS_METHOD quantization_settings",
        "interposer_engine._runner": "Runner",
        "interposer_engine._sampling": (
            "SamplingState is_listing non_finite penalties_of sampling_batch"
        ),
        "interposer_engine._scheduler": "Chunk",
        "interposer_engine._sequence": "TokenSequence",
        "interposer_engine._speech.audio": "read_audio",
        "interposer_engine._speech.features": "LogMel",
        "interposer_engine._speech.rules": "TranscriptRules",
        "interposer_engine._tokenizer": "MissingTokenizer",
    },
)


def __dir__() -> list[str]:
    return __all__
