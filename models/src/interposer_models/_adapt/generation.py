"""Replacement of the method ``generate``, which passes a cache that grows in place."""

from __future__ import annotations

import inspect
import sys
from functools import wraps
from typing import Any

from torch import nn

from interposer_models._adapt.adaptation import Adaptation

_CACHE = "past_key_values"
_DYNAMIC = (None, "dynamic")


def bind_generation(adaptation: Adaptation) -> None:
    """Let ``generate`` of this instance pass a ``RowsCache`` unless the caller sets a cache."""
    owner: Any = adaptation.model
    model: nn.Module = owner
    if "transformers" not in sys.modules:
        return
    from transformers import GenerationMixin

    if not isinstance(model, GenerationMixin) or "generate" in vars(model):
        return
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    if supports is None or not supports():
        return
    from interposer_models._adapt.cache import new_cache

    original: Any = owner.generate
    parameters = inspect.signature(original).parameters

    @wraps(original)
    def generate(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(parameters, args, strict=False)) | kwargs
        settings = arguments.get("generation_config") or owner.generation_config

        def setting(name: str) -> Any:
            value = arguments.get(name)
            return getattr(settings, name, None) if value is None else value

        if (
            arguments.get(_CACHE) is None
            and arguments.get("custom_generate") is None
            and setting("cache_implementation") in _DYNAMIC
            and setting("use_cache") is not False
        ):
            cache = new_cache(owner.config)
            if setting("is_assistant"):
                # Draft tokens may be rejected: sliding layers must keep tokens before the window.
                cache.activate_past_recording()
            kwargs = {**kwargs, _CACHE: cache}
            # Set only if necessary: transformers warns of arguments that override a configuration.
            if owner.generation_config.cache_implementation or setting("cache_implementation"):
                kwargs["cache_implementation"] = None
        return original(*args, **kwargs)

    adaptation.changes.set(model, "generate", generate)
