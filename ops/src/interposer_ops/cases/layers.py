"""Cases of the standard layers, taken from those of the ops behind them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from interposer import Case, CustomOp
from interposer.cases import planned_cases
from interposer.cases.axis import ORDINARY
from interposer.cases.layer import LayerCase
from interposer_ops.activations import gelu_and_mul, silu_and_mul
from interposer_ops.linear import embedding, linear
from interposer_ops.norms import fused_add_rms_norm, rms_norm
from interposer_ops.rotary import rotary_embedding

__all__ = [
    "activation_layers",
    "embedding_layers",
    "linear_layers",
    "lm_head_layers",
    "merged_linear_layers",
    "rms_norm_layers",
    "rotary_embedding_layers",
]

_GELU_NAMES = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}


def rms_norm_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield the norm of rows, and of their sum with a residual."""
    for op, method, names in (
        (rms_norm, "forward", ("x",)),
        (fused_add_rms_norm, "forward_add", ("x", "residual")),
    ):
        for case in _few(op, dtype, seed):
            weight, eps = case.arguments["weight"], case.arguments["eps"]
            arguments = {"hidden_size": len(weight), "eps": eps}
            found = _layer(op, case, arguments, names, {"weight": weight})
            yield replace(found, label=f"{method}, {case.label}", method=method)


def linear_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield one projection, with and without a bias."""
    for case in _few(linear, dtype, seed):
        out_features, in_features = case.arguments["weight"].shape
        sizes = {"in_features": in_features, "out_features": out_features}
        yield _projection(case, sizes)


def merged_linear_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield several projections of different sizes as one."""
    for case in _few(linear, dtype, seed):
        out_features, in_features = case.arguments["weight"].shape
        third = out_features // 3
        if third:
            parts = {"q_proj": out_features - 2 * third, "k_proj": third, "v_proj": third}
            yield _projection(case, {"in_features": in_features, "parts": parts})


def embedding_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield the lookup of token embeddings."""
    for case in _few(embedding, dtype, seed):
        weight = case.arguments["weight"]
        arguments = {"vocab_size": weight.shape[0], "hidden_size": weight.shape[1]}
        yield _layer(embedding, case, arguments, ("token_ids",), {"weight": weight})


def lm_head_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield the projection to logits by a weight of its own."""
    for case in _few(linear, dtype, seed):
        if case.arguments["bias"] is None:
            weight = case.arguments["weight"]
            arguments = {"vocab_size": weight.shape[0], "hidden_size": weight.shape[1]}
            yield _layer(linear, case, arguments, ("x",), {"weight": weight})


def rotary_embedding_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield the rotation of queries and keys."""
    for case in _few(rotary_embedding, dtype, seed):
        head_size, rotary_size = case.arguments["query"].shape[-1], case.arguments["cos"].shape[-1]
        arguments = {"head_size": head_size, "rotary_size": 2 * rotary_size}
        yield _layer(rotary_embedding, case, arguments, ("query", "key", "cos", "sin"))


def activation_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield the gated activations by their names in configs of models."""
    for op in (silu_and_mul, gelu_and_mul):
        for case in _few(op, dtype, seed):
            name = _GELU_NAMES.get(case.arguments.get("approximate", ""), "silu")
            size = case.arguments["x"].shape[-1] // 2
            arguments = {"activation": name, "intermediate_size": size}
            found = _layer(op, case, arguments, ("x",))
            yield replace(found, label=f"{name}, {case.label}")


def _few(op: CustomOp[..., Any], dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield covering cases of ordinary numbers; the others are for kernels."""
    for planned in planned_cases(op, seed, quick=True):
        ordinary = planned.point is None or planned.point.special == ORDINARY
        if planned.dtype == dtype and ordinary:
            yield planned.build()


def _projection(case: Case, sizes: dict[str, Any]) -> LayerCase:
    weight, bias = case.arguments["weight"], case.arguments["bias"]
    parameters = {"weight": weight} | ({} if bias is None else {"bias": bias})
    arguments = {**sizes, "bias": bias is not None}
    return _layer(linear, case, arguments, ("x",), parameters)


def _layer(
    op: CustomOp[..., Any],
    case: Case,
    arguments: dict[str, Any],
    inputs: tuple[str, ...],
    parameters: dict[str, torch.Tensor] | None = None,
) -> LayerCase:
    """Return the call of a layer that computes what ``op`` does on ``case``."""
    given = tuple(case.arguments[name] for name in inputs)
    facts = replace(case, arguments={})
    loaded = parameters or {}
    return LayerCase(case.label, arguments, given, loaded, facts=facts, tolerance=op.tolerance)
