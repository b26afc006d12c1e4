"""Load language models from Hugging Face checkpoints and run them on the platform in force."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interposer_models.language_model import Completion, Delta, LanguageModel
    from interposer_models.loader import load
    from interposer_models.sampling_params import SamplingParams

__all__ = ["Completion", "Delta", "LanguageModel", "SamplingParams", "load"]

# Loaded on first use, so that the commands of this distribution can print help without torch.
_HOMES = {
    "Completion": "language_model",
    "Delta": "language_model",
    "LanguageModel": "language_model",
    "SamplingParams": "sampling_params",
    "load": "loader",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'interposer_models' has no attribute {name!r}")
    value = getattr(import_module(f"interposer_models.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(_HOMES)
