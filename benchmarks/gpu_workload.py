"""The calls that ops are measured on: those of a model, and typical ones of every other op."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.flop_counter import FlopCounterMode

from interposer import Config, CustomOp, Placement, Registry, planned
from random_model import write_model

__all__ = ["Item", "items_of_model", "items_of_others", "moved_bytes", "num_flops"]

Dims = Mapping[str, int | float | str | bool]

# Of an 8-billion model of the Llama kind, and of a mixture of experts of the usual size.
_DIMS: Dims = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "in_features": 4096,
    "out_features": 4096,
    "vocab_size": 128256,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_size": 128,
    "value_size": 128,
    "rotary_size": 128,
    "page_size": 16,
    "group_size": 128,
    "block_size": 128,
    "block_rows": 128,
    "block_columns": 128,
    "num_groups": 8,
    "top_groups": 4,
    "num_experts": 64,
    "top_k": 8,
    "rank": 16,
    "num_adapters": 8,
    "latent_size": 512,
    "rope_size": 64,
    "num_channels": 8192,
    "num_value_heads": 32,
    "key_size": 128,
    "state_size": 128,
    "window": 4,
}
_TINY: Dims = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "in_features": 128,
    "out_features": 128,
    "vocab_size": 512,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 64,
    "value_size": 64,
    "rotary_size": 64,
    "group_size": 32,
    "block_size": 32,
    "block_rows": 32,
    "block_columns": 32,
    "num_groups": 4,
    "top_groups": 2,
    "num_experts": 8,
    "top_k": 2,
    "rank": 8,
    "num_adapters": 2,
    "latent_size": 64,
    "rope_size": 32,
    "num_channels": 128,
    "num_value_heads": 4,
    "key_size": 32,
    "state_size": 32,
    "window": 4,
}
# What ops ask besides, which is no size.
_KINDS: Dims = {
    "windowed": False,
    "softcapped": False,
    "sinks": False,
    "alibi": False,
    "prefix_lm": False,
    "per_head": False,
    "biased": False,
    "asymmetric": False,
    "asymmetric_inputs": False,
    "asymmetric_weights": False,
    "limited": False,
    "silu": True,
    "interleaved": False,
    "power_of_two_scales": False,
    "certain_drafts": False,
    "x_dtype": "float8_e4m3fn",
    "weight_dtype": "float8_e4m3fn",
    "out_dtype": "float8_e4m3fn",
    "x_scales": "token",
    "weight_scales": "channel",
    "granularity": "channel",
    "scoring": "softmax",
    "activation": "silu",
    "stored_as": "q4_k",
    "num_draft_tokens": 4,
    "num_top": 5,
}
# Experts are many and small, which is also what can be drawn in a second.
_EXPERTS: Dims = {"hidden_size": 2048, "intermediate_size": 768}
_OWN: Mapping[str, Dims] = {
    **dict.fromkeys(("fused_experts", "fused_experts_fp8", "fused_experts_mxfp4"), _EXPERTS),
    "fused_experts_w4a16": _EXPERTS,
    "grouped_linear": {"in_features": 2048, "out_features": 1536},
    # A head of a latent attention absorbs a projection of this size.
    "batched_linear": {"in_features": 128, "out_features": 512},
    "latent_attention_decode": {"rotary_size": 64},
    "sparse_latent_attention": {"rotary_size": 64, "top_k": 2048},
    "write_latent_cache": {"rotary_size": 64},
    "indexer_topk": {"top_k": 2048},
}
# Integer weights in groups along their inputs.
_GROUPED = ("w4a8_linear", "w4a16_linear", "w8a16_linear", "w4a16_embedding", "w8a16_embedding")
# Experts without biases, whatever is said of them.
_UNBIASED = ("fused_experts_fp8", "fused_experts_w4a16")

# Arguments of which a call touches as many bytes as the other arguments and the result have.
_PARTLY: Mapping[str, tuple[str, ...]] = {
    "embedding": ("weight",),
    "gguf_embedding": ("weight",),
    "w4a16_embedding": ("weight", "scale", "zero_points"),
    "w8a16_embedding": ("weight", "scale", "zero_points"),
    "reshape_and_cache": ("key_cache", "value_cache"),
    "reshape_and_cache_fp8": ("key_cache", "value_cache"),
    "reshape_and_cache_int8": ("key_cache", "value_cache"),
    "write_latent_cache": ("cache",),
    "gather_cache": ("cache",),
    "gather_cache_fp8": ("cache",),
    "gather_cache_int8": ("cache",),
}
# Arguments with a part per expert, of which only those that ``expert_ids`` names are read.
_PER_EXPERT = ("gate_up", "gate_up_scale", "gate_up_bias", "down", "down_scale", "down_bias")

# Steps that decode, and one that reads a prompt; the head sees one row of each sequence.
_DECODING, _PROMPT = (1, 64), 4096
_HEAD_FEATURES = 65536


@dataclass(frozen=True)
class Item:
    """An op with its dims, and the numbers of tokens that it is measured on."""

    op: str
    dims: Dims
    tokens: tuple[int, ...]
    precision: str = ""

    def __str__(self) -> str:
        return self.op


def items_of_model(
    shape: str, placement: Placement, methods: Mapping[str, str | None], tiny: bool = False
) -> Iterator[Item]:
    """Yield each distinct request for a kernel of a model, in the order in which it asks.

    Args:
        methods: by which weights are quantized, by the name of a precision.
    """
    seen = set()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / shape
        write_model(shape, path, plan=True)
        for precision, method in methods.items():
            plan = planned(path, Config(platform=placement.platform.name), "bfloat16", None, method)
            for choice, _ in plan.resolver.choices.values():
                request = choice.request
                key = (request.name, *sorted(request.dims.items()))
                # What quantizes weights runs once, while they are loaded.
                once = request.name.startswith("quantize_weight")
                if request.kind != "kernel" or key in seen or once:
                    continue
                seen.add(key)
                head = int(request.dims.get("out_features", 0)) >= _HEAD_FEATURES
                sampling = "vocab_size" in request.dims and request.name != "embedding"
                long = not (head or sampling)
                tokens = (1, 2) if tiny else (*_DECODING, *((_PROMPT,) if long else ()))
                yield Item(request.name, dict(request.dims), tokens, precision)


def items_of_others(registry: Registry, known: set[str], tiny: bool = False) -> Iterator[Item]:
    """Yield every op that is not ``known``, on typical dims."""
    for op in sorted(registry.ops):
        if op not in known:
            yield Item(op, dims_of(op, tiny), (2,) if tiny else (64,))


def dims_of(op: str, tiny: bool = False) -> dict[str, int | float | str | bool]:
    """Return typical dims for an op."""
    dims = {**_DIMS, **_KINDS, **({} if tiny else _OWN.get(op, {})), **(_TINY if tiny else {})}
    if op in _GROUPED:
        inputs = dims["hidden_size" if op.endswith("embedding") else "in_features"]
        dims["num_groups"] = int(inputs) // int(dims["group_size"])
    if op in _UNBIASED:
        del dims["biased"]
    if op.startswith("gguf") and tiny:
        dims |= {"in_features": 256, "hidden_size": 256}  # a block of the format
    if op.endswith("_fp8") and "cache" in op:
        dims["cache_dtype"] = "float8_e4m3fn"
    return dims


def moved_bytes(op: CustomOp[..., Any], arguments: Mapping[str, Any], result: object) -> int:
    """Return the bytes that a call has to move: each argument read once, each result written once.

    Of a table and of a cache only the rows that a call names are moved.
    """
    partly = _PARTLY.get(op.name, ())
    counted = {name: value for name, value in arguments.items() if name not in partly}
    share = 1.0
    if "expert_ids" in arguments and "gate_up" in arguments:
        experts = len(arguments["gate_up"])
        share = len(torch.unique(arguments["expert_ids"])) / experts
    size = _bytes(result)
    for name, value in counted.items():
        size += int(_bytes(value) * (share if name in _PER_EXPERT else 1.0))
    return 2 * size if partly else size


def num_flops(op: CustomOp[..., Any], arguments: Mapping[str, Any]) -> tuple[int, object]:
    """Return the operations of matrix products of the reference, and its result."""
    with FlopCounterMode(display=False) as counter:
        result = op.reference(*op.signature.bind(**arguments).args)
    return int(counter.get_total_flops()), result


def _bytes(value: object) -> int:
    leaves = _pytree.tree_leaves(value)
    return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
