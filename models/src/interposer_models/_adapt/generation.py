"""The method ``generate`` of an adapted model, which takes a cache that grows in place."""

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
    """Let ``generate`` of this instance pass a cache of rows where nobody asks for another."""
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
    def generate(*args: Any, **named: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | named
        settings = given.get("generation_config") or owner.generation_config

        def setting(name: str) -> Any:
            found = given.get(name)
            return getattr(settings, name, None) if found is None else found

        if (
            given.get(_CACHE) is None
            and given.get("custom_generate") is None
            and setting("cache_implementation") in _DYNAMIC
            and setting("use_cache") is not False
        ):
            cache = new_cache(owner.config)
            if setting("is_assistant"):
                # What it proposes may be taken back, so that windows are not forgotten at once.
                cache.activate_past_recording()
            named = {**named, _CACHE: cache}
            # transformers warns of arguments beside a configuration, so that it is said if need be.
            if owner.generation_config.cache_implementation or setting("cache_implementation"):
                named["cache_implementation"] = None
        return original(*args, **named)

    adaptation.changes.set(model, "generate", generate)
