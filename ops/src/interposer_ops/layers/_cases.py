"""Test cases of the standard layers, derived from the cases of the layers' ops."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from interposer import Case, CustomOp, ExpertsSpec, Site, Tolerance
from interposer_ops.activations._activations import gelu_and_mul, silu_and_mul
from interposer_ops.embedding._embedding import embedding
from interposer_ops.experts._experts import fused_experts
from interposer_ops.experts._routing import topk_softmax
from interposer_ops.layers._attention_cases import plain_spec
from interposer_ops.layers.embedding import Embedding
from interposer_ops.linear._linear import batched_linear, linear
from interposer_ops.norms._norms import fused_add_rms_norm, rms_norm
from interposer_ops.norms._norms_cases import norm_weight
from interposer_ops.rotary._rotary import rotary_embedding
from interposer_testing.cases import ORDINARY, LayerCase, Placed, normal, peak, planned_cases

_GELU_NAMES = {"none": "gelu", "tanh": "gelu_pytorch_tanh"}


def rms_norm_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of RMS norm, with and without a residual stream."""
    for op, method, names in (
        (rms_norm, "forward", ("x",)),
        (fused_add_rms_norm, "forward_add", ("x", "residual")),
    ):
        for case in few_cases(op, dtype, seed):
            weight, eps = case.arguments["weight"], case.arguments["eps"]
            arguments = {"hidden_size": len(weight), "eps": eps}
            layer_case = _layer(op, case, arguments, names, {"weight": weight})
            yield replace(layer_case, label=f"{method}, {case.label}", method=method)


def linear_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of one linear layer, with and without a bias."""
    for case in few_cases(linear, dtype, seed):
        out_features, in_features = case.arguments["weight"].shape
        sizes = {"in_features": in_features, "out_features": out_features}
        yield _projection(case, sizes)


def merged_linear_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of three merged linear layers of different sizes."""
    for case in few_cases(linear, dtype, seed):
        out_features, in_features = case.arguments["weight"].shape
        third = out_features // 3
        if third:
            parts = {"q_proj": out_features - 2 * third, "k_proj": third, "v_proj": third}
            yield _projection(case, {"in_features": in_features, "parts": parts})


def head_linear_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of linear layers of heads."""
    for case in few_cases(batched_linear, dtype, seed):
        weight = case.arguments["weight"]
        heads, in_features, out_features = weight.shape
        sizes = {"num_heads": heads, "in_features": in_features, "out_features": out_features}
        parameters = {"weight": weight.transpose(1, 2).contiguous()}
        yield _layer(batched_linear, case, sizes, ("x",), parameters)


def embedding_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of the embedding lookup, with and without an LM head that shares the table."""
    for case in few_cases(embedding, dtype, seed):
        weight = case.arguments["weight"]
        sizes = {"vocab_size": weight.shape[0], "hidden_size": weight.shape[1]}
        for is_shared in (False, True):
            head = {"head": Placed(lambda site: site.at("head"))} if is_shared else {}
            arguments = {**sizes, **head}
            layer_case = _layer(embedding, case, arguments, ("token_ids",), {"weight": weight})
            yield replace(
                layer_case, label=f"{case.label}{', shared by a head' if is_shared else ''}"
            )


def lm_head_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of the LM head with its own weight, and with the embedding's table."""
    for case in few_cases(linear, dtype, seed):
        if case.arguments["bias"] is None:
            weight = case.arguments["weight"]
            sizes = {"vocab_size": weight.shape[0], "hidden_size": weight.shape[1]}
            for is_tied in (False, True):
                tied = {"tied": Placed(partial(_table, **sizes))} if is_tied else {}
                layer_case = _layer(linear, case, {**sizes, **tied}, ("x",), {"weight": weight})
                yield replace(layer_case, label=f"{case.label}{', tied' if is_tied else ''}")


def _table(head: Site, vocab_size: int, hidden_size: int) -> Embedding:
    """Return the embedding whose table an LM head at this site shares."""
    return Embedding(head.at("table"), vocab_size, hidden_size, head)


def rotary_embedding_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of the rotation of queries and keys."""
    for case in few_cases(rotary_embedding, dtype, seed):
        head_size, rotary_size = case.arguments["query"].shape[-1], case.arguments["cos"].shape[-1]
        arguments = {"head_size": head_size, "rotary_size": 2 * rotary_size}
        yield _layer(rotary_embedding, case, arguments, ("query", "key", "cos", "sin"))


def activation_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of the gated activations, by the names that model configs use."""
    for op in (silu_and_mul, gelu_and_mul):
        for case in few_cases(op, dtype, seed):
            name = _GELU_NAMES.get(case.arguments.get("approximate", ""), "silu")
            size = case.arguments["x"].shape[-1] // 2
            arguments = {"activation": name, "intermediate_size": size}
            layer_case = _layer(op, case, arguments, ("x",))
            yield replace(layer_case, label=f"{name}, {case.label}")


def gated_mlp_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of MLPs of several sizes and activations, with and without biases.

    Error bound: an error of gate or up appears in the result multiplied by at most the other factor
    (no activation has a slope above 1.13), then by the weight of the down projection. So the sum of
    the absolute terms bounds the magnitude of the rounded numbers, too.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, biased, num_tokens, hidden_size, inner in (
        ("silu", False, 1, 64, 96),
        ("silu", True, 9, 33, 47),
        ("gelu", False, 5, 48, 64),
        ("gelu_pytorch_tanh", False, 17, 64, 40),
        ("gelu_pytorch_tanh", True, 0, 16, 32),
    ):
        x = normal((num_tokens, hidden_size), dtype, generator)
        sizes = {"gate_up_proj": (2 * inner, hidden_size), "down_proj": (hidden_size, inner)}
        parameters = {}
        for part, size in sizes.items():
            parameters[f"{part}.weight"] = normal(size, dtype, generator, 0.2)
            if biased:
                parameters[f"{part}.bias"] = normal((size[0],), dtype, generator, 0.2)
        wide = {part: tensor.double().abs() for part, tensor in parameters.items()}
        both = functional.linear(
            x.double().abs(), wide["gate_up_proj.weight"], wide.get("gate_up_proj.bias")
        )
        products = both[:, :inner] * both[:, inner:]
        terms = functional.linear(products, wide["down_proj.weight"], wide.get("down_proj.bias"))
        yield LayerCase(
            f"{name}, {num_tokens} tokens{', biases' if biased else ''}",
            {
                "hidden_size": hidden_size,
                "intermediate_size": inner,
                "activation": name,
                "bias": biased,
            },
            (x,),
            parameters,
            facts=Case(
                "",
                {},
                reduction=2 * hidden_size + inner + 6,
                magnitude=peak(terms),
                rounded=peak(terms),
            ),
            # Roundings that the ops of gate, up, activation and down projection are allowed.
            tolerance=Tolerance(roundings=2 + 2 + 3 + 2),
        )


def self_attention_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of the QKV heads before attention: projected, optionally normalised, rotated.

    The rest of the layer, the backend and a ``linear``, has cases of its own.

    Error bound: a norm turns an error e of a projected number into at most |w| / rms * e * (1 + r).
    r is the largest number of a head divided by the root mean square of the head; the root mean
    square changes by e at most. The rotation adds two numbers with factors of at most 1. This gain
    times the largest projected number is also an upper bound of the norm's result.
    """
    generator = torch.Generator().manual_seed(seed)
    for num_tokens, hidden_size, heads, kv_heads, size, rotary_size, normed, biased in (
        (1, 64, 4, 2, 32, 32, True, False),
        (9, 40, 6, 2, 32, 16, True, False),
        (5, 48, 3, 1, 20, 20, False, True),
        (17, 33, 2, 2, 16, 8, False, False),
        (0, 16, 2, 1, 16, 16, True, False),
    ):
        x = normal((num_tokens, hidden_size), dtype, generator)
        angles = 7 * torch.rand((num_tokens, rotary_size // 2), generator=generator)
        width = (heads + 2 * kv_heads) * size
        parameters = {
            "qkv_proj.weight": normal((width, hidden_size), dtype, generator, 0.2),
            "o_proj.weight": normal((hidden_size, heads * size), dtype, generator, 0.2),
        }
        if biased:
            parameters["qkv_proj.bias"] = normal((width,), dtype, generator, 0.2)
        if normed:
            parameters |= {
                f"{name}_norm.weight": norm_weight(size, dtype, generator) for name in "qk"
            }
        weight, bias = parameters["qkv_proj.weight"].double(), parameters.get("qkv_proj.bias")
        offset = None if bias is None else bias.double()
        projected = functional.linear(x.double(), weight, offset).unflatten(-1, (-1, size))
        terms = functional.linear(
            x.double().abs(), weight.abs(), None if offset is None else offset.abs()
        )
        gain = 1.0
        if normed:
            rms = projected.square().mean(-1).sqrt()
            steepest = (1 + projected.abs().amax(-1) / rms) / rms
            factor = max(peak(parameters[f"{name}_norm.weight"]) for name in "qk")
            gain = max(gain, factor * peak(steepest))
        yield LayerCase(
            f"{num_tokens} tokens, {heads} heads of {size}{', norms' if normed else ''}"
            f"{', biases' if biased else ''}",
            {
                "spec": plain_spec((heads, kv_heads, size), dtype),
                "hidden_size": hidden_size,
                "rotary_size": rotary_size,
                "norm_eps": 1e-6 if normed else None,
                "qkv_bias": biased,
            },
            (x, angles.cos(), angles.sin()),
            parameters,
            method="heads",
            facts=Case(
                "",
                {},
                reduction=hidden_size + size + 6,
                magnitude=2 * gain * peak(terms),
                rounded=2 * gain * peak(projected),
            ),
            # Roundings that the ops of projection, norm and rotation are allowed.
            tolerance=Tolerance(roundings=2 + 3 + 3),
        )


def router_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases whose logits are exact: the weight is the identity, so that logits equal ``x``.

    In the cases with a bias, one expert has weight 0 and a very low bias, and so is never chosen.
    """
    for case in few_cases(topk_softmax, dtype, seed):
        logits, top_k = case.arguments["logits"], case.arguments["top_k"]
        num_experts = logits.shape[1]
        if not logits.isfinite().all():
            continue  # infinity times a zero weight is NaN
        for biased in (False, True) if top_k < num_experts else (False,):
            weight = torch.eye(num_experts, dtype=dtype)
            parameters = {"weight": weight}
            if biased:
                weight[-1] = 0
                parameters["bias"] = torch.tensor([0.0] * (num_experts - 1) + [-64.0], dtype=dtype)
            arguments = {
                "hidden_size": num_experts,
                "num_experts": num_experts,
                "top_k": top_k,
                "renormalize": case.arguments["renormalize"],
                "bias": biased,
            }
            layer_case = _layer(topk_softmax, case, arguments, ("logits",), parameters)
            yield replace(layer_case, label=f"{case.label}{', a bias' if biased else ''}")


def experts_layers(dtype: torch.dtype, seed: int) -> Iterator[LayerCase]:
    """Yield cases of unquantized experts, gates first and alternating."""
    for case in few_cases(fused_experts, dtype, seed):
        for alternating in (False, True):
            num_experts, hidden_size, inner = case.arguments["down"].shape
            spec = ExpertsSpec(
                hidden_size=hidden_size,
                intermediate_size=inner,
                num_experts=num_experts,
                top_k=case.arguments["expert_ids"].shape[1],
                activation=case.arguments["activation"],
                biased=case.arguments["down_bias"] is not None,
                alternating=alternating,
                inputs_first=alternating,
            )
            parameters = dict(_stored(case.arguments, alternating=alternating))
            inputs = ("x", "weights", "expert_ids")
            layer_case = _layer(fused_experts, case, {"spec": spec}, inputs, parameters)
            yield replace(layer_case, label=f"{case.label}{', alternating' if alternating else ''}")


def _stored(arguments: Mapping[str, Any], *, alternating: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint name and tensor of each parameter of the experts."""
    for name in ("gate_up", "down"):
        matrices, bias = arguments[name], arguments[f"{name}_bias"]
        if alternating and name == "gate_up":
            matrices, bias = (
                None if tensor is None else torch.stack(tensor.chunk(2, 1), 2).flatten(1, 2)
                for tensor in (matrices, bias)
            )
        yield f"{name}_proj", matrices.transpose(1, 2).contiguous() if alternating else matrices
        if bias is not None:
            yield f"{name}_proj_bias", bias


def few_cases(op: CustomOp[..., Any], dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield a small covering set of cases with ordinary numbers; special values test kernels."""
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
    parameters: dict[str, Tensor] | None = None,
) -> LayerCase:
    """Build a layer case that expects the result of ``op`` on ``case``."""
    input_tensors = tuple(case.arguments[name] for name in inputs)
    facts = replace(case, arguments={})
    loaded = parameters or {}
    return LayerCase(
        case.label, arguments, input_tensors, loaded, facts=facts, tolerance=op.tolerance
    )
