"""Example settings of supported checkpoints, for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def fp8_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return FP8 settings with every scale granularity, by label."""
    blocks = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    settings: Mapping[str, Mapping[str, Any]] = {
        "blocks": blocks,
        "blocks, powers of two": {**blocks, "fmt": "e4m3", "scale_fmt": "ue8m0"},
        "blocks of 64 by 32": {**blocks, "weight_block_size": [64, 32]},
        "per tensor": {"activation_scheme": "dynamic", "ignored_layers": ["lm_head"]},
        "per tensor, static": {"activation_scheme": "static", "ignored_layers": ["lm_head"]},
        "per tensor, static, of transformers": {
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["lm_head"],
        },
    }
    return {label: {"quant_method": "fp8", **fields} for label, fields in settings.items()}


def fbgemm_fp8_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return FBGEMM settings by label: one activation bound is rarely reached, the other often."""
    return {
        label: {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": upper_bound,
            "modules_to_not_convert": ["lm_head"],
        }
        for label, upper_bound in (("usual bound", 1200.0), ("low bound", 2.0))
    }


def gptq_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return 4-bit and 8-bit GPTQ settings, with and without zero points or act order, by label."""
    # Fields that every writer of GPTQ checkpoints states.
    plain = {"bits": 4, "group_size": 128, "sym": True, "desc_act": False}
    settings: Mapping[str, Mapping[str, Any]] = {
        "4 bits": plain,
        "4 bits, asymmetric": {**plain, "sym": False},
        "4 bits, act order": {**plain, "desc_act": True, "group_size": 32},
        "4 bits, act order, asymmetric, second format": {
            **plain,
            "desc_act": True,
            "sym": False,
            "checkpoint_format": "gptq_v2",
        },
        "4 bits per output": {**plain, "group_size": -1},
        "8 bits": {**plain, "bits": 8, "group_size": 32},
        "8 bits, asymmetric, act order": {**plain, "bits": 8, "sym": False, "desc_act": True},
        "8 bits per output, second format": {
            **plain,
            "bits": 8,
            "group_size": -1,
            "checkpoint_format": "gptq_v2",
        },
        "8 bits for some": {**plain, "dynamic": {r"+:.*\.q_proj$": {"bits": 8, "sym": False}}},
    }
    return {label: {"quant_method": "gptq", **fields} for label, fields in settings.items()}


def awq_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return AWQ settings with and without zero points, by label."""
    plain = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
    return {
        "groups of 128": {**plain, "group_size": 128},
        "groups of 32": {**plain, "group_size": 32, "modules_to_not_convert": ["lm_head"]},
        "per output": {**plain, "group_size": -1},
        "symmetric": {**plain, "group_size": 64, "zero_point": False},
    }


def modelopt_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return ModelOpt settings of every algorithm, from both settings files, by label."""
    uniform: Mapping[str, Mapping[str, Any]] = {
        "8 bits per tensor": {"quant_algo": "FP8"},
        "8 bits per output": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "NVFP4": {"quant_algo": "NVFP4", "group_size": 16},
        "MXFP8": {"quant_algo": "MXFP8", "group_size": 32},
        "8 bits per block, weights only": {"quant_algo": "fp8_pb_wo"},
        "int8, weights only": {"quant_algo": "W8A16"},
        "int4, weights only": {
            "quant_algo": "W4A16_AWQ",
            "group_size": 32,
            "has_zero_point": False,
            "pre_quant_scale": True,
        },
        "NVFP4, weights only": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "NVFP4, scaled inputs": {
            "quant_algo": "NVFP4_AWQ",
            "group_size": 16,
            "has_zero_point": False,
            "pre_quant_scale": True,
        },
    }
    # Exporters write the settings to hf_quant_config.json, to config.json, or to both.
    layers = {"model.layers.0.self_attn.q_proj": {"quant_algo": "NVFP4", "group_size": 16}}
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    excluded = ["lm_head", "model.embed_tokens*"]
    separate_file = {
        label: {"quantization": {**settings, "exclude_modules": excluded}}
        for label, settings in uniform.items()
    }
    return {
        **{
            label: {"quant_method": "modelopt", **fields} for label, fields in separate_file.items()
        },
        "mixed, in config.json": {"quant_method": "modelopt", **mixed, "ignore": []},
    }


def auto_round_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return auto-round settings of every packing format and with overrides, by label."""
    plain = {"bits": 4, "group_size": 32, "sym": True, "packing_format": "auto_round:auto_gptq"}
    settings: Mapping[str, Mapping[str, Any]] = {
        "4 bits": plain,
        "4 bits, asymmetric": {**plain, "sym": False},
        "4 bits, asymmetric, order stored": {
            **plain,
            "sym": False,
            "packing_format": "auto_round:gptqmodel",
        },
        "4 bits, words of AWQ": {**plain, "packing_format": "auto_round:auto_awq"},
        "8 bits per output": {**plain, "bits": 8, "group_size": -1},
        "8 bits for some": {**plain, "extra_config": {r".*q_proj.*": {"bits": 8}}},
    }
    return {label: {"quant_method": "auto-round", **fields} for label, fields in settings.items()}


def inc_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return one auto-round example under the method name ``inc``; the format is the same."""
    return {"4 bits": {**auto_round_examples()["4 bits"], "quant_method": "inc"}}
