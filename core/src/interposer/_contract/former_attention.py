"""Adapter for attention backends with one method for each combination of scales and sinks.

Backends of earlier versions define such methods; ``forward`` takes keywords instead.
"""

from __future__ import annotations

import warnings
from functools import wraps
from inspect import Parameter, signature
from typing import Any

_KEYWORDS = {
    "forward_quantized": ("scales",),
    "forward_with_sinks": ("sinks",),
    "forward_quantized_with_sinks": ("scales", "sinks"),
    "forward_stored": ("stored",),
}
_METHODS = {keywords: name for name, keywords in _KEYWORDS.items()}


def adapt_former_methods(backend: type[Any]) -> None:
    """Make ``forward`` of a class call its former methods, and issue a deprecation warning."""
    former = [name for name in _KEYWORDS if hasattr(backend, name)]
    if not former or vars(backend).keys().isdisjoint({"forward", *former}):
        return
    keywords = dict.fromkeys(keyword for name in former for keyword in _KEYWORDS[name])
    warnings.warn(
        f"{backend.__module__}.{backend.__qualname__} defines {former[0]}. "
        f"Try: forward(self, query, key, value, cache, plan, *, {', '.join(keywords)})",
        DeprecationWarning,
        stacklevel=4,  # the class statement, which calls ABCMeta.__new__ and __init_subclass__
    )
    plain = backend.forward

    @wraps(plain)
    def forward(
        self: Any, query: Any, key: Any, value: Any, cache: Any, plan: Any, **options: Any
    ) -> Any:
        scales, sinks = options.get("scales"), options.get("sinks")
        if options.get("stored") and "forward_stored" in former:
            return self.forward_stored(query, cache, plan, scales, sinks)
        tensors = {"scales": scales, "sinks": sinks}
        tensors = {keyword: tensor for keyword, tensor in tensors.items() if tensor is not None}
        name = _METHODS.get(tuple(tensors))
        if name not in former or options.get("stored"):
            return plain(self, query, key, value, cache, plan, **options)
        out = {"out": options["out"]} if "out" in options else {}
        method = getattr(self, name)
        return method(query, key, value, cache, plan, *tensors.values(), **out)

    # ``AttentionBackend.takes`` reads the signature.
    plain_signature = signature(plain)
    parameters = {keyword: Parameter(keyword, Parameter.KEYWORD_ONLY) for keyword in keywords}
    parameters = {**plain_signature.parameters, **parameters}
    ordered = sorted(parameters.values(), key=lambda parameter: parameter.kind)
    vars(forward)["__signature__"] = plain_signature.replace(parameters=ordered)
    backend.forward = forward
