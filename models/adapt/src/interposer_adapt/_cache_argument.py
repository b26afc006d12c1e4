"""The name of the forward argument that passes the KV cache, which differs between models.

transformers 5.24 renamed ``past_key_values``, and ``cache_params`` of Mamba models, to ``cache``.
Code outside of transformers can have either name with any version, so that signatures decide.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

CACHE_ARGUMENTS = ("past_key_values", "cache_params", "cache")
"""All names of the argument. Before 5.24, ``cache`` named other things in a few models."""


def cache_argument(forward: Callable[..., Any]) -> str:
    """Return the name of the forward's KV-cache argument, or transformers' usual name without one.

    A forward without the name can still accept it in ``**kwargs``.
    """
    return _parameter(forward) or generate_cache_argument()


@cache
def generate_cache_argument() -> str:
    """Return the name of the KV-cache argument of transformers' ``generate``."""
    from transformers import GenerationMixin

    return _parameter(GenerationMixin.prepare_inputs_for_generation)


def _parameter(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), "")
