"""Ways in which published checkpoints state how they are quantized, right and wrong ones.

A kind is a checkpoint as its library writes it; a variation changes what its files say of it. To
extend the tester with a new report, add a value to a table here, a kind to ``KINDS``, or a function
to ``MOVES``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ABSENT", "KINDS", "Files", "Kind", "vary"]

ABSENT = "(absent)"
Settings = dict[str, Any]
Files = dict[str, Settings]
"""Contents of JSON files by name: ``config``, and those that state quantization beside it."""
Values = dict[str, tuple[Any, ...]]


@dataclass(frozen=True)
class Kind:
    """A quantized checkpoint.

    Attributes:
        settings: ``quantization_config`` as the library writes it.
        values: what its fields can be, by the path of their names, which dots join.
        storage: what the tensors hold, for the writer of the method.
        bound: the largest difference of logits over the largest logit. Where inputs are rounded,
            two ways to compute a scale may round some number otherwise.
        beside: the name of a file beside config.json, and what it says.
    """

    method: str
    settings: Settings
    values: Values
    storage: Settings = field(default_factory=dict)
    bound: float = 2e-4
    beside: tuple[str, Settings] | None = None


_LEFT_OUT = ["model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"]
_METHODS = (ABSENT, None, "GPTQ", "gptq", "awq", "fp8", "compressed-tensors", "unheard-of", 3)
_COMMON: Values = {"something_new": (3, None, False), "quant_method": _METHODS}

_SEARCH: Values = {
    "damp_percent": (0.01, 0.1, None),
    "dataset": (None, "c4", ["a text"]),
    "model_file_base_name": ("model", None),
    "model_name_or_path": (None, "somebody/model"),
    "static_groups": (True, False),
    "tokenizer": (None, "somebody/model"),
    "true_sequential": (True, False, None),
}
_GPTQ: Values = {
    **_COMMON,
    **_SEARCH,
    "bits": (ABSENT, None, 4, 8, 3, "4", 4.0, True),
    "w_bit": (4, 8),
    "wbits": (4,),
    "group_size": (ABSENT, None, 32, -1, 16, 128, 0, "32", 32.0),
    "groupsize": (32, 64),
    "desc_act": (ABSENT, None, True, False, 1, "false"),
    "act_group_aware": (True, False),
    "sym": (ABSENT, None, True, False, 0),
    "checkpoint_format": (ABSENT, None, "gptq", "gptq_v2", "GPTQ", "marlin", "unheard-of", ""),
    "format": (ABSENT, None, "gptq", "gptq_v2", "marlin", "gemm"),
    "is_marlin_format": (True, False, None),
    "pack_dtype": ("int32", "int8", None),
    "lm_head": (True, False, None, 1),
    "use_exllama": (True, False, None),
    "exllama_config": ({"version": 1}, None),
    "backend": ("auto", "marlin", None),
    "meta": ({"quantizer": ["gptqmodel:1.9"]}, None),
    "quantizer": ("gptqmodel", None),
    "modules_in_block_to_quantize": (
        None,
        [],
        [["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]],
        ["mlp.down_proj"],
    ),
    "modules_to_not_convert": (None, [], ["lm_head"], _LEFT_OUT),
    "dynamic": (None, {}, {"-:.*o_proj": {}}, {"+:.*": {"bits": 4}}, {".*mlp.*": {"bits": 8}}, []),
    "quant_method": (*_METHODS, "gptq"),
}
_AWQ: Values = {
    **_COMMON,
    **_SEARCH,
    "bits": (ABSENT, None, 4, 8, "4", 4.0),
    "w_bit": (4, 8),
    "group_size": (ABSENT, None, 32, -1, 64, "32"),
    "q_group_size": (32, 64, 128),
    "zero_point": (ABSENT, None, True, False, 1),
    "version": (ABSENT, None, "gemm", "GEMM", "gemv", "GEMV", "gemv_fast", "Gemm", 1),
    "format": (None, "gemm", "gemv"),
    "checkpoint_format": (None, "gemm"),
    "backend": (None, "autoawq", "auto", "llm-awq"),
    "do_fuse": (False, True, None),
    "sym": (True, False),
    "modules_to_not_convert": (ABSENT, None, [], ["lm_head"], _LEFT_OUT, ["down_proj"], "lm_head"),
    "lm_head": (True, False),
    "desc_act": (False, True),
}
_AUTO_ROUND: Values = {
    **_COMMON,
    **_SEARCH,
    "quant_method": (*_METHODS, "auto-round", "intel/auto-round"),
    "bits": (ABSENT, None, 4, 8, "4"),
    "group_size": (ABSENT, None, 32, 128, -1, 0),
    "sym": (ABSENT, None, True, False),
    "data_type": (ABSENT, None, "int", "mx_fp"),
    "packing_format": (
        *(ABSENT, None, "auto_round:auto_gptq", "auto_gptq", "auto_round", "auto_round:gptqmodel"),
        *("auto_round:auto_awq", "auto_round:exllamav2", "unheard-of"),
    ),
    "act_bits": (None, 16, 8),
    "extra_config": (
        *(ABSENT, None, {}, {"lm_head": {"bits": 16}}, {_LEFT_OUT[0]: {"bits": 16}}),
        *({_LEFT_OUT[0]: {"bits": 8}}, {_LEFT_OUT[0]: {"group_size": 32, "bits": None}}, []),
    ),
    "block_name_to_quantize": (ABSENT, None, "model.layers", ["model.layers"], ["model.layers.0"]),
    "modules_to_not_convert": (ABSENT, None, [], ["lm_head"], _LEFT_OUT),
    "desc_act": (False, True),
    "iters": (200, 0, None),
    "autoround_version": ("0.5.1", None),
}
_FP8: Values = {
    **_COMMON,
    "activation_scheme": (ABSENT, None, "dynamic", "static", "DYNAMIC", "none"),
    "fmt": (ABSENT, None, "e4m3", "e5m2", "float8_e4m3fn"),
    "scale_fmt": (None, "float", "ue8m0", "e8m0"),
    "weight_block_size": (ABSENT, None, [32, 32], (128, 128), [32], [0, 32], 32, ["32", "32"]),
    "modules_to_not_convert": (ABSENT, None, [], ["lm_head"], _LEFT_OUT, ["o_proj"], "lm_head"),
    "ignored_layers": (None, [], ["lm_head"], _LEFT_OUT),
    "modules_to_convert": (None, [], ["lm_head"]),
    "dequantize": (False, None, True),
    "expert_dtype": ("fp8", "fp4", None),
    "kv_cache_scheme": (None, {"num_bits": 8, "type": "float"}),
}
_FBGEMM: Values = {
    **_COMMON,
    "activation_scale_ub": (ABSENT, None, 1200.0, 1200, 0.5, 2.0, 0.0, -1.0, "1200"),
    "modules_to_not_convert": (ABSENT, None, [], ["lm_head"], ["o_proj"], "lm_head"),
}
_COMPRESSED: Values = {
    **_COMMON,
    "format": (
        *(ABSENT, None, "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
        *("dense", "mixed-precision", "marlin-24", "unheard-of"),
    ),
    "quantization_status": (ABSENT, None, "compressed", "frozen", "initialized", "COMPRESSED"),
    "ignore": (
        *(ABSENT, None, [], ["lm_head"], ["re:lm_head"], ["re:.*lm_head"], "lm_head", ["head"]),
        *(["Linear"], ["re:("], ["re:.*down_proj", "lm_head"], [*_LEFT_OUT, "lm_head"]),
    ),
    "kv_cache_scheme": (ABSENT, None, {}),
    "sparsity_config": (ABSENT, None, {}, {"format": "dense"}, {"format": "sparse-24-bitmask"}),
    "sparsity_structure": ("unstructured",),
    "transform_config": (ABSENT, None, {}),
    "global_compression_ratio": (ABSENT, None, 1.5, "1.5"),
    "version": (ABSENT, None, "0.9.1"),
    "run_compressed": (True, False),
    "dequantize": (False,),
    "config_groups": (ABSENT, None, {}, {"W4A16": ["Linear"]}, []),
    "config_groups.group_0.targets": (
        *(ABSENT, ["Linear"], ["re:.*proj"], ["re:model.*"], [], "Linear", ["linear"], ["Module"]),
        *(["re:.*self_attn.*", "re:.*mlp.*"], ["q_proj"], ["LlamaForCausalLM"], ["re:.*q_proj$"]),
    ),
    "config_groups.group_0.format": (
        *(ABSENT, None, "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
        *("dense", "unheard-of"),
    ),
    "config_groups.group_0.output_activations": (ABSENT, None, {"num_bits": 8}),
    "config_groups.group_0.input_activations": (
        *(ABSENT, None, {}, {"num_bits": 8, "dynamic": True, "strategy": "token"}),
        {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
    ),
    **{
        f"config_groups.group_0.weights.{name}": values
        for name, values in {
            "num_bits": (ABSENT, None, 4, 8, "4", 4.0, 3),
            "type": (ABSENT, None, "int", "float", "INT"),
            "symmetric": (ABSENT, None, True, False, 1),
            "strategy": (ABSENT, None, "group", "channel", "tensor", "block", "GROUP", "token"),
            "group_size": (ABSENT, None, 32, -1, 16, 128, 0, "32"),
            "block_structure": (ABSENT, None, [32, 32], "32x32", [16, 32]),
            "dynamic": (ABSENT, None, False, True, "local"),
            "actorder": (ABSENT, None, "weight", "static", "group", False, True),
            "observer": (ABSENT, None, "minmax", "mse"),
            "observer_kwargs": (ABSENT, None, {}, {"averaging_constant": 0.1}),
            "scale_dtype": (ABSENT, None, "torch.bfloat16", "torch.float8_e4m3fn", "float16"),
            "zp_dtype": (ABSENT, None, "torch.int8", "torch.uint8"),
        }.items()
    },
}
_ROUNDED: Values = {
    **_COMPRESSED,
    **{
        f"config_groups.group_0.input_activations.{name}": values
        for name, values in {
            "num_bits": (ABSENT, None, 8, 4, "8"),
            "type": (ABSENT, "int", "float"),
            "symmetric": (ABSENT, True, False),
            "strategy": (ABSENT, None, "token", "tensor", "group", "channel"),
            "group_size": (ABSENT, None, 32),
            "dynamic": (ABSENT, True, False, None, "local"),
            "observer": (ABSENT, None, "memoryless"),
            "actorder": (ABSENT, None, False),
        }.items()
    },
}
_MODELOPT: Values = {
    **_COMMON,
    "quant_method": (*_METHODS, "modelopt"),
    "quant_algo": (ABSENT, None, "FP8", "fp8", "NVFP4", "W8A16", "FP8_PER_CHANNEL_PER_TOKEN"),
    "ignore": (ABSENT, None, [], ["lm_head"], ["*head"], ["*o_proj*"], "lm_head"),
    "kv_cache_scheme": (ABSENT, None, {"num_bits": 8, "type": "float"}),
    "kv_cache_quant_algo": (ABSENT, None, "FP8"),
    "group_size": (ABSENT, None, 16),
    "producer": (ABSENT, {"name": "modelopt", "version": "0.29"}),
    "config_groups": (ABSENT, None, {}),
}
_BITSANDBYTES: Values = {
    **_COMMON,
    "quant_method": (*_METHODS, "bitsandbytes"),
    "load_in_4bit": (ABSENT, None, True, False, 1),
    "load_in_8bit": (ABSENT, None, True, False),
    "_load_in_4bit": (ABSENT, True, False),
    "_load_in_8bit": (ABSENT, True, False),
    "bnb_4bit_quant_type": (ABSENT, None, "nf4", "fp4", "NF4"),
    "bnb_4bit_use_double_quant": (ABSENT, None, True, False),
    "bnb_4bit_compute_dtype": (ABSENT, None, "float16", "float32", "torch.float16"),
    "bnb_4bit_quant_storage": (ABSENT, None, "uint8", "bfloat16"),
    "llm_int8_skip_modules": (ABSENT, None, [], ["lm_head"], ["o_proj"], _LEFT_OUT, "lm_head"),
    "llm_int8_threshold": (ABSENT, None, 6.0, 0, "6"),
    "llm_int8_has_fp16_weight": (ABSENT, False, True),
    "llm_int8_enable_fp32_cpu_offload": (ABSENT, False, True),
}
_MXFP4: Values = {
    **_COMMON,
    "quant_method": (*_METHODS, "mxfp4", "mxfp4"),
    "modules_to_not_convert": (
        *(ABSENT, None, [], ["lm_head"], ["model.layers.*.self_attn"], "lm_head"),
        *(["model.layers.*.mlp.experts"], ["mlp"], ["model.layers.0"]),
    ),
    "dequantize": (ABSENT, None, False, True),
}


def _group(weights: Settings, form: str, inputs: Settings | None = None) -> Settings:
    """Return the settings of compressed-tensors for all linear layers but the head."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {**group, "output_activations": None}},
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
_PER_TOKEN = {"strategy": "token", "dynamic": True}
_OF_ROUNDED_INPUTS = 6e-3

_GPTQ_4: Settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
_AUTO_4: Settings = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True}
_AWQ_4: Settings = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
_NF4: Settings = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "bnb_4bit_compute_dtype": "float32",
    "llm_int8_skip_modules": None,
    "llm_int8_threshold": 6.0,
}
_FP8_ALGORITHM: Settings = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
_HF_QUANT: Settings = {
    "producer": {"name": "modelopt", "version": "0.29"},
    "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]},
}

KINDS: dict[str, Kind] = {
    "gptq": Kind("gptq", {**_GPTQ_4, "sym": True}, _GPTQ),
    "gptq, asymmetric": Kind("gptq", {**_GPTQ_4, "sym": False}, _GPTQ, {"sym": False}),
    "gptq_v2, asymmetric": Kind(
        "gptq",
        {**_GPTQ_4, "sym": False, "checkpoint_format": "gptq_v2"},
        _GPTQ,
        {"sym": False, "format": "gptq_v2"},
    ),
    "gptq_v2": Kind(
        "gptq",
        {**_GPTQ_4, "sym": True, "checkpoint_format": "gptq_v2"},
        _GPTQ,
        {"format": "gptq_v2"},
    ),
    "gptq, act order": Kind(
        "gptq", {**_GPTQ_4, "sym": True, "desc_act": True}, _GPTQ, {"ordered": False}
    ),
    "gptq, 8 bits": Kind(
        "gptq",
        {**_GPTQ_4, "sym": True, "bits": 8, "group_size": -1},
        _GPTQ,
        {"bits": 8, "group_size": -1},
    ),
    "gptq, some plain": Kind(
        "gptq",
        {**_GPTQ_4, "sym": True, "dynamic": {"-:.*o_proj": {}}},
        _GPTQ,
        {"plain": ["o_proj"]},
    ),
    "auto-round": Kind(
        "auto-round", {**_AUTO_4, "packing_format": "auto_round:auto_gptq"}, _AUTO_ROUND
    ),
    "auto-round, asymmetric": Kind(
        "auto-round",
        {**_AUTO_4, "sym": False, "packing_format": "auto_round"},
        _AUTO_ROUND,
        {"sym": False, "format": "gptq_v2"},
    ),
    "awq": Kind("awq", {**_AWQ_4, "zero_point": True}, _AWQ),
    "awq, symmetric": Kind("awq", {**_AWQ_4, "zero_point": False}, _AWQ, {"sym": True}),
    "gptq, experts": Kind("gptq", {**_GPTQ_4, "sym": True}, _GPTQ, {"is_mixture": True}),
    "awq, experts": Kind("awq", {**_AWQ_4, "zero_point": True}, _AWQ, {"is_mixture": True}),
    "awq, some plain": Kind(
        "awq",
        {**_AWQ_4, "zero_point": True, "modules_to_not_convert": ["down_proj"]},
        _AWQ,
        {"plain": ["down_proj"]},
    ),
    "fp8 in blocks": Kind(
        "fp8",
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [32, 32],
            "modules_to_not_convert": ["lm_head"],
        },
        _FP8,
        {"block": 32},
        _OF_ROUNDED_INPUTS,
    ),
    "fp8 per tensor": Kind(
        "fp8",
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": None,
            "modules_to_not_convert": ["lm_head"],
        },
        _FP8,
        {"scale": "weight_scale_inv"},
        _OF_ROUNDED_INPUTS,
    ),
    "fp8 of AutoFP8, static": Kind(
        "fp8",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        _FP8,
        {"scale": "weight_scale", "input": "input_scale"},
        _OF_ROUNDED_INPUTS,
    ),
    "fbgemm_fp8": Kind(
        "fbgemm_fp8",
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": ["lm_head"],
        },
        _FBGEMM,
        bound=_OF_ROUNDED_INPUTS,
    ),
    "W4A16": Kind("compressed-tensors", _group(_INT4, "pack-quantized"), _COMPRESSED),
    "W4A16, asymmetric": Kind(
        "compressed-tensors",
        _group({**_INT4, "symmetric": False}, "pack-quantized"),
        _COMPRESSED,
    ),
    "W4A16, some plain": Kind(
        "compressed-tensors",
        {**_group(_INT4, "pack-quantized"), "ignore": ["lm_head", "re:.*down_proj", *_LEFT_OUT]},
        _COMPRESSED,
    ),
    "W8A16": Kind("compressed-tensors", _group(_INT8, "int-quantized"), _COMPRESSED),
    "W8A8": Kind(
        "compressed-tensors",
        _group(_INT8, "int-quantized", {"num_bits": 8, "type": "int", **_PER_TOKEN}),
        _ROUNDED,
        bound=_OF_ROUNDED_INPUTS,
    ),
    "W8A8, static": Kind(
        "compressed-tensors",
        _group(
            {**_INT8, "strategy": "tensor"},
            "int-quantized",
            {**_INT8, "strategy": "tensor", "dynamic": False},
        ),
        _ROUNDED,
        bound=_OF_ROUNDED_INPUTS,
    ),
    "W4A16 per output": Kind(
        "compressed-tensors",
        _group({**_INT8, "num_bits": 4}, "pack-quantized"),
        _COMPRESSED,
    ),
    "W4A8": Kind(
        "compressed-tensors",
        _group(_INT4, "int-quantized", {"num_bits": 8, "type": "int", **_PER_TOKEN}),
        _ROUNDED,
        bound=_OF_ROUNDED_INPUTS,
    ),
    "W8A8, float8": Kind(
        "compressed-tensors",
        _group({**_FLOAT8, "strategy": "channel"}, "float-quantized", {**_FLOAT8, **_PER_TOKEN}),
        _ROUNDED,
        bound=_OF_ROUNDED_INPUTS,
    ),
    "W8A8, float8, static": Kind(
        "compressed-tensors",
        _group(
            {**_FLOAT8, "strategy": "tensor"},
            "float-quantized",
            {**_FLOAT8, "strategy": "tensor", "dynamic": False},
        ),
        _ROUNDED,
        bound=_OF_ROUNDED_INPUTS,
    ),
    "W8A8, float8 in blocks": Kind(
        "compressed-tensors",
        _group(
            {**_FLOAT8, "strategy": "block", "block_structure": [32, 32]},
            "float-quantized",
            {**_FLOAT8, "strategy": "group", "group_size": 32, "dynamic": True},
        ),
        _ROUNDED,
        bound=_OF_ROUNDED_INPUTS,
    ),
    "modelopt FP8": Kind(
        "modelopt", _FP8_ALGORITHM, _MODELOPT, {"input": "input_scale"}, _OF_ROUNDED_INPUTS
    ),
    "modelopt FP8, two files": Kind(
        "modelopt",
        _FP8_ALGORITHM,
        _MODELOPT,
        {"input": "input_scale"},
        _OF_ROUNDED_INPUTS,
        ("hf_quant_config", _HF_QUANT),
    ),
    "modelopt FP8 per channel": Kind(
        "modelopt",
        {**_FP8_ALGORITHM, "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        _MODELOPT,
        {"rows": True},
        _OF_ROUNDED_INPUTS,
    ),
    "nf4": Kind("bitsandbytes", _NF4, _BITSANDBYTES),
    "LLM.int8": Kind(
        "bitsandbytes",
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": None},
        _BITSANDBYTES,
        {"bits": 8},
    ),
    "mxfp4": Kind(
        "mxfp4",
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
        _MXFP4,
    ),
}

_FILE_OF = {"gptq": "quantize_config", "awq": "quant_config", "modelopt": "hf_quant_config"}
# Names that files beside config.json have for the same fields.
_OLD_NAMES = {"bits": "w_bit", "group_size": "q_group_size"}
PLACES = (
    *("file", "file", "file beside", "nested", "both", "compression_config"),
    *("null", "absent", "list", "text", "empty"),
)
Move = Callable[[Kind, Files, random.Random], str]


def set_field(kind: Kind, files: Files, choose: random.Random) -> str:
    path = choose.choice(sorted(kind.values))
    value = choose.choice(kind.values[path])
    *parents, last = path.split(".")
    place: Any = files["config"].get("quantization_config")
    for name in parents:
        place = place.get(name) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        return ""
    if value == ABSENT:
        place.pop(last, None)
    else:
        place[last] = copy.deepcopy(value)
    return f"{path} is {value!r}"


def rename_fields(kind: Kind, files: Files, choose: random.Random) -> str:
    """Give fields the names that older releases have for them, alone or beside the new ones."""
    settings = files["config"].get("quantization_config")
    old_names = {**_OLD_NAMES, "modules_to_not_convert": "ignored_layers"}
    names = [name for name in old_names if isinstance(settings, dict) and name in settings]
    if not isinstance(settings, dict) or not names:
        return ""
    name, is_both = choose.choice(names), choose.random() < 0.3
    settings[old_names[name]] = settings[name] if is_both else settings.pop(name)
    return f"{name} is spelled {old_names[name]}{' too' if is_both else ''}"


def move_settings(kind: Kind, files: Files, choose: random.Random) -> str:
    """State the quantization elsewhere, twice, or not at all."""
    config = files["config"]
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return ""
    where = choose.choice(PLACES)
    if where in ("file", "file beside"):
        name = _FILE_OF.get(kind.method, "quantize_config")
        if name == "hf_quant_config":
            files[name] = copy.deepcopy(_HF_QUANT)
        else:
            files[name] = copy.deepcopy(settings)
            if choose.random() < 0.7:
                files[name].pop("quant_method", None)
            if name == "quant_config" and choose.random() < 0.7:
                files[name] = {_OLD_NAMES.get(n, n): v for n, v in files[name].items()}
            if where == "file beside" and choose.random() < 0.5:
                files[name]["bits"] = 8
        where = f"{where} {name}"
        if "beside" not in where:
            del config["quantization_config"]
    elif where in ("nested", "both", "compression_config"):
        if where != "both":
            del config["quantization_config"]
        outer = config if where == "compression_config" else config.setdefault("text_config", {})
        outer["compression_config" if outer is config else "quantization_config"] = settings
    elif where == "absent":
        del config["quantization_config"]
    else:
        config["quantization_config"] = {"null": None, "list": [settings], "text": kind.method}.get(
            where, {}
        )
    return f"quantization_config: {where}"


def change_file_beside(kind: Kind, files: Files, choose: random.Random) -> str:
    """Change the file beside config.json, or leave config.json without any settings."""
    if kind.beside is None or kind.beside[0] not in files:
        return ""
    file = files[kind.beside[0]]
    name = choose.choice(("quant_algo", "exclude_modules", "producer", "quantization", "config"))
    if name == "config":
        files["config"].pop("quantization_config", None)
        return "hf_quant_config alone"
    values = {
        "quant_algo": ("FP8", "NVFP4", None, "fp8"),
        "exclude_modules": (["lm_head"], [], None, ["lm_head", "*o_proj"], "lm_head"),
        "producer": (None, {"name": "modelopt"}, {"name": "other"}, {}),
        "quantization": (None, [], {}),
    }
    value = choose.choice(values[name])
    place = file.get("quantization") if name in ("quant_algo", "exclude_modules") else file
    if not isinstance(place, dict):
        return ""
    place[name] = value
    return f"{name} of {kind.beside[0]} is {value!r}"


MOVES: tuple[Move, ...] = (
    *(set_field,) * 10,
    *(rename_fields,) * 2,
    move_settings,
    *(change_file_beside,) * 2,
)


def vary(kind: Kind, config: Settings, choose: random.Random) -> tuple[Files, list[str]]:
    """Return the changed files of a kind, and descriptions of one or two changes.

    Args:
        config: config.json without a quantization.
    """
    files: Files = {"config": {**config, "quantization_config": copy.deepcopy(kind.settings)}}
    if kind.beside is not None:
        files[kind.beside[0]] = copy.deepcopy(kind.beside[1])
    changes, wanted = list[str](), choose.choice([1, 1, 2])
    while len(changes) < wanted:
        if change := choose.choice(MOVES)(kind, files, choose):
            changes.append(change)
        elif len(changes) == 1:
            break
    return files, changes
