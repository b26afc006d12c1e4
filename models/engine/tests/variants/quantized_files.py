"""Compare models of varied quantization settings with a reference that shares no code with them.

    python quantized_files.py FIRST END [--keep FOLDER] [--refusals]

As ``compare.py``, for ``quantization_config`` and the files that state the same beside config.json.
The references: the library compressed-tensors for its own checkpoints, transformers for ``fp8`` in
blocks and ``mxfp4``, and for other methods the published formula, which is written down here as a
plain dequantization. A reference takes the settings as its library does, and refuses tensors that
they leave without a place.
"""

from __future__ import annotations

import functools
import json
import random
import re
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor, ModelCompressor  # type: ignore[import-untyped]
from compressed_tensors.quantization import (  # type: ignore[import-untyped]
    QuantizationConfig,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import (  # type: ignore[import-untyped]
    calculate_qparams,
    is_module_quantized,
)
from loguru import logger
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig
from transformers.quantizers.quantizers_utils import should_convert_module
from transformers.utils.quantization_config import (
    AwqConfig,
    FbgemmFp8Config,
    FineGrainedFP8Config,
    GPTQConfig,
    Mxfp4Config,
)

sys.path.insert(0, str(Path(__file__).parents[4]))

from models.engine.tests.variants.compare import (
    PROMPT,
    Comparison,
    Outcome,
    draw_weights,
    reference_logits,
    relative_difference,
    run,
)
from models.engine.tests.variants.quantization_variations import KINDS, Files, Kind, vary

from interposer.errors import InterposerError
from interposer_engine import load

logger.disable("compressed_tensors")  # it warns of each format but the one that it would take

Tensors = dict[str, torch.Tensor]
Round = Callable[[torch.Tensor], torch.Tensor]
"""A function that rounds inputs as a layer does."""
Read = Callable[[str, Tensors], tuple[torch.Tensor, Round | None] | None]
"""A function of a layer's name and tensors that returns its weight; None for a plain one."""

_FLOAT8 = torch.float8_e4m3fn
_LARGEST = 448.0
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Source: the table of bitsandbytes for NF4, arXiv:2305.14314, appendix E.
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}


class NotTaken(Exception):
    """The reference does not read a checkpoint, or leaves some of its tensors out."""


# Writers: each returns the tensors of a linear layer for its float weight.


def _words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes along the last dimension into int32, the first in the lowest bits."""
    per_word = 32 // bits
    shifts = torch.arange(per_word) * bits
    packed: torch.Tensor = (codes.long().unflatten(-1, (-1, per_word)) << shifts).sum(-1)
    return packed.where(packed < 2**31, packed - 2**32).to(torch.int32)


def _codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes that ``_words`` packed."""
    shifts = torch.arange(32 // bits) * bits
    return ((words.long() & 0xFFFFFFFF).unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(-2)


def _grid(weight: torch.Tensor, groups: torch.Tensor, bits: int, sym: bool) -> Tensors:
    """Return codes ``[O, I]``, scales and zero points ``[O, G]`` for the group of each input."""
    middle, top = 1 << bits - 1, (1 << bits) - 1
    num_groups = int(groups.max()) + 1
    scales = torch.empty(len(weight), num_groups)
    zeros = torch.empty(len(weight), num_groups)
    for group in range(num_groups):
        part = weight[:, groups == group]
        if sym:
            scales[:, group] = part.abs().amax(1) / middle
            zeros[:, group] = middle
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = (-low / scales[:, group]).round().clamp(1, top)
    scales = scales.half().float()
    codes = (weight / scales[:, groups] + zeros[:, groups]).round().clamp(0, top)
    return {"codes": codes, "scales": scales, "zeros": zeros}


def write_gptq(weight: torch.Tensor, storage: dict[str, Any]) -> Tensors:
    bits, size = storage.get("bits", 4), storage.get("group_size", 32)
    inputs = weight.shape[1]
    order = torch.arange(inputs)
    if not storage.get("ordered", True):
        order = torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))
    groups = order // (inputs if size == -1 else size)
    grid = _grid(weight, groups, bits, storage.get("sym", True))
    less = 0 if storage.get("format") == "gptq_v2" else 1
    return {
        "qweight": _words(grid["codes"], bits).T.contiguous(),
        "qzeros": _words(grid["zeros"].T - less, bits),
        "scales": grid["scales"].T.half().contiguous(),
        "g_idx": groups.to(torch.int32),
    }


def write_auto_round(weight: torch.Tensor, storage: dict[str, Any]) -> Tensors:
    return {name: tensor for name, tensor in write_gptq(weight, storage).items() if name != "g_idx"}


def write_awq(weight: torch.Tensor, storage: dict[str, Any]) -> Tensors:
    grid = _grid(weight, torch.arange(weight.shape[1]) // 32, 4, storage.get("sym", False))

    def packed(codes: torch.Tensor) -> torch.Tensor:
        return _words(codes.unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2), 4)

    return {
        "qweight": packed(grid["codes"].T),
        "qzeros": packed(grid["zeros"].T),
        "scales": grid["scales"].T.half().contiguous(),
    }


def write_fp8(weight: torch.Tensor, storage: dict[str, Any]) -> Tensors:
    size, name = storage.get("block"), storage.get("scale", "weight_scale")
    if size is not None:
        scale = _block_maxima(weight, size, size) / _LARGEST
        return {
            "weight": (weight / _spread(scale, size, size)).to(_FLOAT8),
            "weight_scale_inv": scale,
        }
    if storage.get("rows"):
        scale = weight.abs().amax(1) / _LARGEST
        return {"weight": (weight / scale[:, None]).to(_FLOAT8), "weight_scale": scale}
    scale = weight.abs().amax() / _LARGEST
    tensors = {"weight": (weight / scale).to(_FLOAT8), name: scale}
    if "input" in storage:
        tensors[storage["input"]] = torch.tensor(0.01)
    return tensors


def write_fbgemm(weight: torch.Tensor, storage: dict[str, Any]) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True) / _LARGEST
    return {"weight": (weight / scale).to(_FLOAT8), "weight_scale": scale}


def write_bitsandbytes(weight: torch.Tensor, storage: dict[str, Any]) -> Tensors:
    if storage.get("bits") == 8:
        largest = weight.abs().amax(1)
        return {
            "weight": (weight / largest[:, None] * 127).round().to(torch.int8),
            "SCB": largest,
            "weight_format": torch.tensor(0, dtype=torch.uint8),
        }
    book = torch.tensor(_NF4)
    blocks = weight.flatten().unflatten(0, (-1, 64))
    largest = blocks.abs().amax(1)
    codes = ((blocks / largest[:, None])[..., None] - book).abs().argmin(-1).flatten()
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    return {
        "weight": (codes[0::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1),
        "weight.absmax": largest,
        "weight.quant_map": book,
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }


WRITERS: dict[str, Callable[[torch.Tensor, dict[str, Any]], Tensors]] = {
    "gptq": write_gptq,
    "auto-round": write_auto_round,
    "awq": write_awq,
    "fp8": write_fp8,
    "modelopt": write_fp8,
    "fbgemm_fp8": write_fbgemm,
    "bitsandbytes": write_bitsandbytes,
}


def _block_maxima(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    blocks: torch.Tensor = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    return blocks.abs().amax((1, 3))


def _spread(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


# References: each returns the model that a checkpoint's settings describe.


def _rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-_LARGEST, _LARGEST).to(_FLOAT8).float() * scale


def _per_token(x: torch.Tensor, largest: float = float("inf")) -> torch.Tensor:
    return _rounded(x, x.abs().amax(-1, keepdim=True).clamp(max=largest) / _LARGEST)


def _per_block(x: torch.Tensor, columns: int, powers: bool) -> torch.Tensor:
    parts = x.unflatten(-1, (-1, columns))
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-4) / _LARGEST
    if powers:
        scale = scale.log2().ceil().exp2()
    return _rounded(parts, scale).flatten(-2)


def _read_gptq(settings: dict[str, Any]) -> Read:
    own = {n: v for n, v in settings.items() if n != "modules_in_block_to_quantize"}
    parsed = GPTQConfig.from_dict(own)
    listed = settings.get("modules_in_block_to_quantize")
    names = None
    if listed is not None:
        names = tuple(n for entry in listed for n in ([entry] if isinstance(entry, str) else entry))
    left_out = [k.removeprefix("-:") for k in settings.get("dynamic") or {} if k.startswith("-:")]
    if parsed.format not in ("gptq", "gptq_v2"):
        raise NotTaken(f"format {parsed.format}")

    def read(name: str, own: Tensors) -> tuple[torch.Tensor, Round | None] | None:
        if any(re.match(pattern, name) for pattern in left_out):
            return None
        if name == "lm_head" and not settings.get("lm_head"):
            return None
        if names is not None and not name.endswith(names):
            return None
        codes = _codes(own.pop("qweight").T.contiguous(), parsed.bits)
        zeros = _zeros(own, settings, parsed.bits, less=parsed.format == "gptq")
        groups, scales = own.pop("g_idx").long(), own.pop("scales").float()
        return (scales[groups] * (codes.T - zeros[groups])).T, None

    return read


def _read_awq(settings: dict[str, Any]) -> Read:
    parsed = AwqConfig.from_dict(settings)
    if parsed.bits != 4 or parsed.format != "gemm":
        raise NotTaken(f"{parsed.bits} bits, {parsed.format}")

    def read(name: str, own: Tensors) -> tuple[torch.Tensor, Round | None] | None:
        parts = parsed.modules_to_not_convert or []
        if any(part in name for part in parts) or (
            name == "lm_head" and not settings.get("lm_head")
        ):
            return None
        back = torch.tensor(_AWQ_ORDER).argsort()

        def codes(words: torch.Tensor) -> torch.Tensor:
            stored: torch.Tensor = _codes(words, 4).unflatten(-1, (-1, 8))
            return stored[..., back].flatten(-2)

        weight, zeros = codes(own.pop("qweight")), codes(own.pop("qzeros"))
        scales = own.pop("scales").float()
        size = len(weight) if parsed.group_size == -1 else parsed.group_size
        groups = torch.arange(len(weight)) // size
        if int(groups.max()) + 1 != len(scales):
            raise NotTaken(f"group_size {size}")
        return ((weight - zeros[groups]) * scales[groups]).T, None

    return read


def _zeros(own: Tensors, settings: dict[str, Any], bits: int, less: int) -> torch.Tensor:
    """Return the zero points of GPTQ, which are stored less ``less``.

    Some writers name one format and store the other: symmetric weights of both have one meaning,
    because their zero points are known.
    """
    stored, middle = _codes(own.pop("qzeros"), bits), 1 << bits - 1
    if settings.get("sym", True) and bool(((stored == middle) | (stored == middle - 1)).all()):
        return torch.full_like(stored, middle)
    return stored + less


def _read_auto_round(settings: dict[str, Any]) -> Read:
    if settings.get("data_type", "int") != "int":
        raise NotTaken(f"data_type {settings['data_type']}")
    less = {"auto_round": 0, "auto_round:auto_gptq": 1, "auto_gptq": 1}[settings["packing_format"]]
    overrides, left_out = settings.get("extra_config") or {}, settings.get("modules_to_not_convert")

    def read(name: str, own: Tensors) -> tuple[torch.Tensor, Round | None] | None:
        changed = {n: v for n, v in overrides.get(name, {}).items() if v is not None}
        bits = {**settings, **changed}["bits"]
        if name == "lm_head" or bits >= 16 or any(re.search(p, name) for p in left_out or ()):
            return None
        codes = _codes(own.pop("qweight").T.contiguous(), bits)
        zeros = _zeros(own, {**settings, **changed}, bits, less)
        scales = own.pop("scales").float()
        size = {"group_size": 128, **settings, **changed}["group_size"]
        groups = torch.arange(codes.shape[1]) // (codes.shape[1] if size == -1 else size)
        if int(groups.max()) + 1 != len(scales):
            raise NotTaken(f"group_size {size}")
        return (scales[groups] * (codes.T - zeros[groups])).T, None

    return read


def _read_fp8(settings: dict[str, Any]) -> Read:
    parsed = FineGrainedFP8Config.from_dict(settings)
    # What states no size of blocks was written by AutoFP8, with names of its own.
    is_auto = "weight_block_size" not in settings
    names = ("weight_scale", "input_scale") if is_auto else ("weight_scale_inv", "activation_scale")
    if settings.get("fmt") not in (None, "e4m3") or parsed.dequantize:
        raise NotTaken("another format")

    def read(name: str, own: Tensors) -> tuple[torch.Tensor, Round | None] | None:
        if not should_convert_module(name, parsed.modules_to_not_convert):
            return None
        weight, scale = own.pop("weight"), own.pop(names[0])
        if weight.dtype != _FLOAT8:
            raise NotTaken(f"{name} is {weight.dtype}")
        if not is_auto and parsed.weight_block_size is not None:
            rows, columns = map(int, parsed.weight_block_size)
            if [s * size for s, size in zip(scale.shape, (rows, columns), strict=True)] != list(
                weight.shape
            ):
                raise NotTaken(f"blocks of {rows} by {columns}")
            powers = parsed.scale_fmt == "ue8m0"
            return weight.float() * _spread(scale, rows, columns), lambda x: _per_block(
                x, columns, powers
            )
        if parsed.activation_scheme == "static":
            input_scale = own.pop(names[1])
            return weight.float() * scale, lambda x: _rounded(x, input_scale)
        return weight.float() * scale, _per_token

    return read


def _read_fbgemm(settings: dict[str, Any]) -> Read:
    parsed = FbgemmFp8Config.from_dict(settings)
    bound = float(parsed.activation_scale_ub)

    def read(name: str, own: Tensors) -> tuple[torch.Tensor, Round | None] | None:
        if not should_convert_module(name, parsed.modules_to_not_convert):
            return None
        return own.pop("weight").float() * own.pop("weight_scale"), lambda x: _per_token(x, bound)

    return read


def _read_modelopt(settings: dict[str, Any]) -> Read:
    beside = settings.get("quantization") or {}
    algorithm = settings.get("quant_algo") or beside.get("quant_algo")
    left_out = settings.get("ignore") or beside.get("exclude_modules") or []
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise NotTaken(f"{algorithm}")

    def read(name: str, own: Tensors) -> tuple[torch.Tensor, Round | None] | None:
        if any(fnmatchcase(name, glob) for glob in left_out):
            return None
        weight, scale = own.pop("weight").float(), own.pop("weight_scale")
        if algorithm == "FP8":
            input_scale = own.pop("input_scale")
            return weight * scale, lambda x: _rounded(x, input_scale)
        return weight * scale[:, None], _per_token

    return read


def _read_bitsandbytes(settings: dict[str, Any]) -> Read:
    if settings.get("load_in_4bit") is settings.get("load_in_8bit"):
        raise NotTaken("the width is not stated")
    skipped = settings.get("llm_int8_skip_modules")
    skipped = ["lm_head"] if skipped is None else skipped

    def read(name: str, own: Tensors) -> tuple[torch.Tensor, Round | None] | None:
        if not should_convert_module(name, skipped):
            return None
        if settings.get("load_in_8bit"):
            own.pop("weight_format")
            return own.pop("weight").float() * own.pop("SCB")[:, None] / 127, None
        state = own.pop("weight.quant_state.bitsandbytes__nf4")
        facts = json.loads(bytes(state.tolist()))
        book, packed = own.pop("weight.quant_map"), own.pop("weight").flatten()
        codes = torch.stack([packed >> 4, packed & 15], 1).flatten().long()
        blocks = book[codes].unflatten(0, (-1, facts["blocksize"]))
        return (blocks * own.pop("weight.absmax")[:, None]).reshape(facts["shape"]), None

    return read


READERS: dict[str, Callable[[dict[str, Any]], Read]] = {
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "awq": _read_awq,
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "modelopt": _read_modelopt,
    "bitsandbytes": _read_bitsandbytes,
}


def _without_rest(stored: Tensors, owner: str) -> None:
    if stored:
        raise NotTaken(f"{owner} has no place for {sorted(stored)[0]}")


def of_formula(stored: Tensors, settings: dict[str, Any]) -> Any:
    """Return a plain model of the weights that the published formulas give."""
    method = settings.get("quant_method")
    if method not in READERS:
        raise NotTaken(f"quant_method is {method!r}")
    read = READERS[method](settings)
    model = plain_model()
    rest = dict(stored)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            own = {
                key[len(name) + 1 :]: rest.pop(key) for key in [*rest] if key.startswith(f"{name}.")
            }
            result = read(name, own)
            weight, rounds = result if result is not None else (own.pop("weight"), None)
            _without_rest(own, name)
            if result is None and weight.dtype != torch.float32:
                raise NotTaken(f"{name} is plain, but stored as {weight.dtype}")
            if weight.shape != module.weight.shape:
                raise NotTaken(f"{name} has the shape {tuple(weight.shape)}")
            module.weight.data = weight.float()
            if rounds is not None:
                module.register_forward_pre_hook(
                    lambda _, args, rounds=rounds: (rounds(args[0]), *args[1:])
                )
    for name, parameter in model.named_parameters():
        if name in rest:
            parameter.data = rest.pop(name)
    _without_rest(rest, "the model")
    return model


def of_mixture(stored: Tensors, settings: dict[str, Any]) -> Any:
    """Return the plain model of a mixture, whose experts transformers merges while it loads."""
    read = READERS[settings["quant_method"]](settings)
    owners: dict[str, Tensors] = {}
    for key, tensor in stored.items():
        owner, _, name = key.rpartition(".")
        owners.setdefault(owner, {})[name] = tensor
    tensors = Tensors()
    for owner, own in owners.items():
        is_linear = owner.endswith("_proj") or owner == "lm_head"
        if is_linear and (result := read(owner, own)) is not None:
            own["weight"] = result[0].float()
        tensors[f"{owner}.weight"] = own.pop("weight")
        _without_rest(own, owner)
    with tempfile.TemporaryDirectory() as temporary:
        mixture().config.save_pretrained(temporary)
        _save(Path(temporary), tensors)
        return _read_whole(Path(temporary))


def of_library(stored: Tensors, settings: dict[str, Any]) -> Any:
    """Return the model of a checkpoint that compressed-tensors decompresses and runs."""
    if settings.get("quant_method") != "compressed-tensors":
        raise NotTaken(f"quant_method is {settings.get('quant_method')!r}")
    known = QuantizationConfig.model_fields
    config = QuantizationConfig.model_validate({n: v for n, v in settings.items() if n in known})
    model = plain_model()
    apply_quantization_config(model, config, show_progress=False)
    rest = dict(stored)
    for name, module in model.named_modules():
        own = {
            key.rpartition(".")[2]: rest.pop(key)
            for key in [*rest]
            if key.rpartition(".")[0] == name
        }
        if not own:
            continue
        if is_module_quantized(module):
            form = module.quantization_scheme.format or config.format
            compressor = BaseCompressor.get_value_from_registry(getattr(form, "value", form))
            own = compressor.decompress(own, module.quantization_scheme)
        for key, parameter in module.named_parameters(recurse=False):
            if key == "weight":
                if own["weight"].shape != parameter.shape or own["weight"].dtype == torch.int8:
                    raise NotTaken(f"{name} is stored otherwise")
                parameter.data = own.pop("weight").float()
            elif key in own:
                parameter.data = own.pop(key)
        for key in ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"):
            if is_module_quantized(module):
                own.pop(key, None)
        _without_rest(own, name)
        rounds = _other_rounding(getattr(module, "quantization_scheme", None))
        if rounds is not None:
            module.quantization_enabled = False
            module.register_forward_pre_hook(
                lambda _, args, rounds=rounds: (rounds(args[0]), *args[1:])
            )
    _without_rest(rest, "the model")
    return model


def _other_rounding(scheme: Any) -> Round | None:
    """Return how inputs are rounded where the scheme differs from the library on purpose.

    int8 has scales of max / 127, where the library takes 127.5. A scale for all tokens at once,
    which depends on the batch, is replaced by one per token.
    """
    inputs = None if scheme is None else scheme.input_activations
    if inputs is None or not inputs.dynamic or not inputs.symmetric or inputs.num_bits != 8:
        return None
    if inputs.type == "int":
        return _int8_per_token if inputs.strategy == "token" else None
    return _per_token if inputs.strategy == "tensor" else None


def _int8_per_token(x: torch.Tensor) -> torch.Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / scale).round() * scale


def plain_model() -> Any:
    """Return the model of most kinds, with the plain weights that are quantized."""
    model = transformers.LlamaForCausalLM(LlamaConfig(**_SIZES)).eval()
    model.config.architectures = ["LlamaForCausalLM"]
    draw_weights(model, 11)
    return model


def mixture() -> Any:
    """Return the model of kinds with experts, with the plain weights that are quantized."""
    sizes = {**_SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes["head_dim"] = 16
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes))
    model.config.architectures = ["Qwen3MoeForCausalLM"]
    draw_weights(model, 11)
    return model.eval()


def reference(kind: Kind, folder: Path, files: Files) -> Any:
    """Return the reference's model of a checkpoint.

    Raises: Exception: of any type, where the reference does not take it.
    """
    settings = files["config"].get("quantization_config")
    if kind.method == "mxfp4":
        return _of_transformers(folder, settings)
    beside = files.get("hf_quant_config")
    if beside is not None:
        settings = {
            "quant_method": beside["producer"]["name"],
            **(settings or {}),
            "quantization": beside["quantization"],
        }
    stored = load_file(folder / "model.safetensors")
    if not isinstance(settings, dict):
        settings = next((f for n, f in files.items() if n.startswith("quant")), settings)
        if not isinstance(settings, dict):
            raise NotTaken("no settings")
        settings = {"quant_method": kind.method, **settings}
    old_names = {"w_bit": "bits", "q_group_size": "group_size"}
    if kind.method == "awq":
        settings = {old_names.get(n, n): v for n, v in reversed(settings.items())}
    if kind.method == "compressed-tensors":
        return of_library(stored, settings)
    return (of_mixture if kind.storage.get("is_mixture") else of_formula)(stored, settings)


def _of_transformers(folder: Path, settings: Any) -> Any:
    if Mxfp4Config.from_dict(settings).quant_method != "mxfp4":
        raise NotTaken("another method")
    return _read_whole(folder)


def _read_whole(folder: Path) -> Any:
    """Return the model of transformers, which must have a place for each tensor."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, report = loaded[0].eval(), loaded[1]
    if report["missing_keys"] or report["unexpected_keys"] or report["mismatched_keys"]:
        raise NotTaken("tensors are left out")
    return model


@functools.cache
def base(name: str) -> tuple[Path, dict[str, Any], torch.Tensor]:
    """Return a kind's folder, its config.json without a quantization, and its right logits."""
    kind, folder = KINDS[name], Path(tempfile.mkdtemp())
    if kind.method == "mxfp4":
        _write_mxfp4(folder)
    elif kind.method == "compressed-tensors":
        _write_by_library(folder, kind.settings)
    else:
        _write_by_formula(folder, kind)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    files: Files = {"config": {**config, "quantization_config": kind.settings}}
    if kind.beside is not None:
        files[kind.beside[0]] = kind.beside[1]
    _state(folder, files)
    return folder, config, reference_logits(reference(kind, folder, files), PROMPT)


def _write_by_formula(folder: Path, kind: Kind) -> None:
    model = mixture() if kind.storage.get("is_mixture") else plain_model()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    plain = kind.storage.get("plain", ())
    for name in [key.removesuffix(".weight") for key in tensors]:
        if name.endswith("_proj") and not name.endswith(tuple(plain)):
            weight = tensors.pop(f"{name}.weight")
            for key, tensor in WRITERS[kind.method](weight, kind.storage).items():
                tensors[f"{name}.{key}"] = tensor
    _save(folder, tensors)


def _write_by_library(folder: Path, settings: dict[str, Any]) -> None:
    model = plain_model()
    apply_quantization_config(
        model, QuantizationConfig.model_validate(settings), show_progress=False
    )
    for module in model.modules():
        if is_module_quantized(module):
            scheme = module.quantization_scheme
            parts = _parts(module.weight.detach(), scheme.weights)
            found = calculate_qparams(parts.amin(-1), parts.amax(-1), scheme.weights)
            for key, values in zip(("weight_scale", "weight_zero_point"), found, strict=True):
                if hasattr(module, key):
                    getattr(module, key).data.copy_(values.reshape(getattr(module, key).shape))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.01)
    form = settings["format"]
    ModelCompressor.from_pretrained_model(model, form).compress_model(model)
    model.config.save_pretrained(folder)
    _save(folder, model.state_dict())


def _parts(weight: torch.Tensor, args: Any) -> torch.Tensor:
    """Return a view of a weight, along whose last dimension one scale holds."""
    if args.strategy == "tensor":
        return weight.reshape(1, -1)
    if args.strategy == "block":
        rows, columns = args.block_structure
        blocks: torch.Tensor = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        return blocks.transpose(1, 2).flatten(2)
    groups: torch.Tensor = weight.unflatten(
        1, (-1, args.group_size if args.strategy == "group" else weight.shape[1])
    )
    return groups


def _write_mxfp4(folder: Path) -> None:
    sizes = {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    model = GptOssForCausalLM(GptOssConfig(**{**sizes, "num_hidden_layers": 1}))
    model.config.architectures = ["GptOssForCausalLM"]
    draw_weights(model, 11)
    model.config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    tensors = dict(model.state_dict())
    for name in [*tensors]:
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensors.pop(name).shape
            shape = (experts, outputs, inputs // 32)
            tensors[f"{name}_blocks"] = torch.randint(
                0, 256, (*shape, 16), generator=generator, dtype=torch.uint8
            )
            tensors[f"{name}_scales"] = torch.randint(
                121, 124, shape, generator=generator, dtype=torch.uint8
            )
    _save(folder, tensors)


def _save(folder: Path, tensors: Tensors) -> None:
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, folder / "model.safetensors", {"format": "pt"})


def _state(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


def judge(name: str, folder: Path, files: Files) -> Outcome:
    """Return the outcome of a checkpoint: equal, refused, or a fault in capital letters."""
    kind, intended = KINDS[name], base(name)[2]
    try:
        lm = load(folder, "float32", platform="cpu", cache_tokens=128, max_sequences=1)
        logits = lm.logits(PROMPT)
    except InterposerError as error:
        # Linear methods name the layer.
        is_located = str(folder) in str(error) or "model.layers." in str(error)
        return Outcome("refused" if is_located else "NAMELESS", str(error))
    except Exception as error:  # noqa: BLE001 - what is to be found
        return Outcome("CRASH", f"{type(error).__name__}: {error}")
    from_intended = relative_difference(logits, intended)
    try:
        expected = reference_logits(reference(kind, folder, files), PROMPT)
    except Exception as error:  # noqa: BLE001 - whatever a reference raises
        if from_intended < kind.bound:
            return Outcome("as it was written", f"the reference: {type(error).__name__}: {error}")
        details = f"{from_intended:.2g} from what was written, and no reference takes it: {error}"
        return Outcome("DIFFERENT", details)
    difference = relative_difference(logits, expected)
    if difference < kind.bound:
        return Outcome("equal", "")
    return Outcome(
        "DIFFERENT", f"{difference:.2g} of the largest, {from_intended:.2g} from what was written"
    )


def compare(first: int, end: int) -> Iterator[Comparison]:
    """Compare checkpoints by their numbers, each in a folder that its reader may copy."""
    names = sorted(KINDS)
    for number in range(first, end):
        name = names[number % len(names)]
        source, config, _ = base(name)
        files, changes = vary(KINDS[name], config, random.Random(number))
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "checkpoint"
            folder.mkdir()
            shutil.copy(source / "model.safetensors", folder)
            _state(folder, files)
            yield Comparison(number, name, changes, judge(name, folder, files), folder)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(compare, str(__doc__))
