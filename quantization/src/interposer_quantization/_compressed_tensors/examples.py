"""Example settings of compressed-tensors checkpoints, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Arguments = Mapping[str, Any]

_OUTPUT: Arguments = {"num_bits": 8, "strategy": "channel"}
_GROUP_128: Arguments = {"num_bits": 4, "strategy": "group", "group_size": 128}
_GROUP_32: Arguments = {"num_bits": 8, "strategy": "group", "group_size": 32}
_TENSOR: Arguments = {"num_bits": 8, "strategy": "tensor"}
_FLOAT_OUTPUT: Arguments = {"num_bits": 8, "type": "float", "strategy": "channel"}
_FLOAT_TENSOR: Arguments = {"num_bits": 8, "type": "float", "strategy": "tensor"}
_BLOCKS: Arguments = {
    "num_bits": 8,
    "type": "float",
    "strategy": "block",
    "block_structure": [128, 128],
}
_NVFP4: Arguments = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": 16,
    "scale_dtype": "torch.float8_e4m3fn",
}
_MXFP4: Arguments = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
}
_MXFP8: Arguments = {**_MXFP4, "num_bits": 8}
_ASYMMETRIC: Arguments = {"symmetric": False}
_DYNAMIC: Arguments = {"dynamic": True}

_TOKENS: Arguments = {"num_bits": 8, "strategy": "token", **_DYNAMIC}
_FLOAT_TOKENS: Arguments = {**_TOKENS, "type": "float"}
_FLOAT_GROUPS: Arguments = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": 128,
    **_DYNAMIC,
}

# Label: (format, weight arguments, input arguments).
_LAYERS: Mapping[str, tuple[str, Arguments, Arguments | None]] = {
    "int8 per output": ("int-quantized", _OUTPUT, None),
    "int8 per group": ("int-quantized", _GROUP_32, None),
    "int8 with one scale, asymmetric": ("naive-quantized", {**_TENSOR, **_ASYMMETRIC}, None),
    "int8 per group, asymmetric": ("naive-quantized", {**_GROUP_32, **_ASYMMETRIC}, None),
    "packed int4 per group": ("pack-quantized", _GROUP_128, None),
    "packed int4 per output, asymmetric": (
        "pack-quantized",
        {**_OUTPUT, "num_bits": 4, **_ASYMMETRIC},
        None,
    ),
    "packed int4 per group, act order": (
        "pack-quantized",
        {**_GROUP_128, "group_size": 32, "actorder": "group", **_ASYMMETRIC},
        None,
    ),
    "packed int8 per group, asymmetric": ("pack-quantized", {**_GROUP_32, **_ASYMMETRIC}, None),
    "packed int3 per group": ("pack-quantized", {**_GROUP_128, "num_bits": 3}, None),
    "packed int6 per group, asymmetric": (
        "pack-quantized",
        {**_GROUP_32, "num_bits": 6, **_ASYMMETRIC},
        None,
    ),
    "packed int4, inputs int8": ("pack-quantized", _GROUP_128, _TOKENS),
    "packed int4, inputs float8": ("pack-quantized", _GROUP_128, _FLOAT_TOKENS),
    "int4, inputs int8, asymmetric": (
        "int-quantized",
        _GROUP_128,
        {**_TOKENS, **_ASYMMETRIC},
    ),
    "packed int4, act order, inputs int8": (
        "pack-quantized",
        {**_GROUP_128, "group_size": 32, "actorder": "group", **_ASYMMETRIC},
        _TOKENS,
    ),
    "int4 per output, inputs static, asymmetric": (
        "int-quantized",
        {**_OUTPUT, "num_bits": 4, **_ASYMMETRIC},
        {**_TENSOR, **_ASYMMETRIC},
    ),
    "int8, inputs int8": ("int-quantized", _OUTPUT, _TOKENS),
    "int8, inputs int8, asymmetric": ("int-quantized", _OUTPUT, {**_TOKENS, **_ASYMMETRIC}),
    "int8, inputs static": ("int-quantized", _TENSOR, _TENSOR),
    "int8, inputs static, asymmetric": (
        "int-quantized",
        _OUTPUT,
        {**_TENSOR, **_ASYMMETRIC},
    ),
    "float8 with one scale, inputs static": ("float-quantized", _FLOAT_TENSOR, _FLOAT_TENSOR),
    "float8 per output": ("float-quantized", _FLOAT_OUTPUT, _FLOAT_TOKENS),
    "float8 per output, inputs static": ("float-quantized", _FLOAT_OUTPUT, _FLOAT_TENSOR),
    "float8 in blocks": ("float-quantized", _BLOCKS, _FLOAT_GROUPS),
    "float8 in blocks, inputs per token": ("float-quantized", _BLOCKS, _FLOAT_TOKENS),
    "float8, inputs not quantized": ("naive-quantized", _FLOAT_OUTPUT, None),
    "nvfp4": ("nvfp4-pack-quantized", _NVFP4, {**_NVFP4, "dynamic": "local"}),
    "nvfp4, inputs not quantized": ("nvfp4-pack-quantized", _NVFP4, None),
    "mxfp4": ("mxfp4-pack-quantized", _MXFP4, {**_MXFP4, **_DYNAMIC}),
    "mxfp4, inputs not quantized": ("mxfp4-pack-quantized", _MXFP4, None),
    "mxfp4, inputs float8": ("mxfp4-pack-quantized", _MXFP4, _FLOAT_GROUPS),
    "mxfp8": ("mxfp8-quantized", _MXFP8, {**_MXFP8, **_DYNAMIC}),
    "mxfp8, inputs not quantized": ("mxfp8-quantized", _MXFP8, None),
}


def compressed_tensors_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return settings of every supported format and input quantization, by label."""
    examples = {
        label: _settings(form, {"group_0": _group(["Linear"], weights, inputs)})
        for label, (form, weights, inputs) in _LAYERS.items()
    }
    examples["several formats"] = _settings(
        "mixed-precision",
        {
            "group_0": _group(["re:.*mlp.*"], _FLOAT_OUTPUT, _FLOAT_TOKENS, "float-quantized"),
            "group_1": _group(["re:.*self_attn.*"], _GROUP_128, None, "pack-quantized"),
        },
    )
    return examples


def _group(
    targets: list[str], weights: Arguments, inputs: Arguments | None, form: str | None = None
) -> Mapping[str, Any]:
    activations = None if inputs is None else dict(inputs)
    return {
        "targets": targets,
        "weights": dict(weights),
        "input_activations": activations,
        "format": form,
    }


def _settings(form: str, groups: Mapping[str, Any]) -> Mapping[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": dict(groups),
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
    }
