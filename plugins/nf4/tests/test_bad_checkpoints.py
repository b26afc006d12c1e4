"""Errors of a checkpoint are told with the tensor that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from interposer.errors import CheckpointError
from interposer_engine import load

LAYER = "model.layers.0.self_attn.k_proj"
Tensors = dict[str, torch.Tensor]
Edit = Callable[[Tensors], None]


def replaced(name: str, tensor: Any) -> Edit:
    def edit(tensors: Tensors) -> None:
        key = f"{LAYER}.{name}"
        tensors[key] = tensor(tensors[key]) if callable(tensor) else tensor

    return edit


def set_at(name: str, place: int, number: float) -> Edit:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = number
        return tensor

    return replaced(name, change)


def both(first: Edit, second: Edit) -> Edit:
    def edit(tensors: Tensors) -> None:
        first(tensors)
        second(tensors)

    return edit


def state(**facts: Any) -> Edit:
    """Replace facts of the state; None removes one."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        known = json.loads(bytes(tensor.tolist())) | facts
        return text(json.dumps({key: value for key, value in known.items() if value is not None}))

    return replaced("weight.quant_state.bitsandbytes__nf4", change)


def text(content: str) -> torch.Tensor:
    return torch.tensor(list(content.encode()), dtype=torch.uint8)


STATE = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
PLAIN: dict[str, tuple[Edit, str, str]] = {
    "truncated scales": (
        replaced("weight.absmax", lambda t: t[:-1].clone()),
        f"{LAYER}.weight.absmax",
        "holds 31 torch.float32, must be 32 floats",
    ),
    "scale that is no number": (
        set_at("weight.absmax", 5, torch.nan),
        f"{LAYER}.weight.absmax",
        "holds 1 numbers that are infinite or not a number, the first is nan at 5",
    ),
    "negative scale": (
        set_at("weight.absmax", 7, -0.5),
        f"{LAYER}.weight.absmax",
        "holds the scale -0.5 for block 7, must not be negative",
    ),
    "huge scale": (
        both(set_at("weight.absmax", 0, 3e38), set_at("weight.quant_map", 3, 2.0)),
        f"{LAYER}.weight.absmax",
        "holds scales with which weights are infinite",
    ),
    "narrow scales": (
        replaced("weight.absmax", lambda t: t.to(torch.float8_e4m3fn)),
        f"{LAYER}.weight.absmax",
        "holds 32 torch.float8_e4m3fn, must be 32 floats",
    ),
    "short codebook": (
        replaced("weight.quant_map", lambda t: t[:15].clone()),
        f"{LAYER}.weight.quant_map",
        "holds 15 torch.float32, must be 16 floats",
    ),
    "infinite codebook": (
        set_at("weight.quant_map", 0, -torch.inf),
        f"{LAYER}.weight.quant_map",
        "the first is -inf at 0",
    ),
    "truncated codes": (
        replaced("weight", lambda t: t[:-1].clone()),
        f"{LAYER}.weight",
        "has 1023 bytes, 1024 hold the values of 32 outputs and 64 inputs",
    ),
    "weight that is not packed": (
        replaced("weight", torch.zeros(32, 64)),
        f"{LAYER}.weight",
        "has 8192 bytes, 1024 hold the values",
    ),
    "no JSON": (
        replaced("weight.quant_state.bitsandbytes__nf4", text("{'quant_type': 'nf4'}")),
        STATE,
        "is no quantization state: Invalid JSON",
    ),
    "no UTF-8": (
        replaced("weight.quant_state.bitsandbytes__nf4", torch.tensor([0xFF, 0xFE]).byte()),
        STATE,
        "is no quantization state: Invalid JSON",
    ),
    "no bytes": (
        replaced("weight.quant_state.bitsandbytes__nf4", torch.zeros(3)),
        STATE,
        "is torch.float32 of shape [3], must be up to 4096 uint8",
    ),
    "long state": (
        replaced("weight.quant_state.bitsandbytes__nf4", text(" " * 4097)),
        STATE,
        "is torch.uint8 of shape [4097], must be up to 4096 uint8",
    ),
    "no object": (
        replaced("weight.quant_state.bitsandbytes__nf4", text("[1]")),
        STATE,
        "is no quantization state: Input should be an object",
    ),
    "unknown type": (
        state(quant_type="nf3"),
        STATE,
        "quant_type: Input should be 'nf4' or 'fp4'",
    ),
    "another type": (
        state(quant_type="fp4"),
        STATE,
        "states quant_type fp4, the config asks for nf4",
    ),
    "odd blocks": (state(blocksize=48), STATE, "blocksize: must be a power of two"),
    "no blocks": (state(blocksize=0), STATE, "blocksize: must be a power of two"),
    "huge blocks": (state(blocksize=2**40), STATE, "must be a power of two up to 4096"),
    "other blocks": (
        state(blocksize=128),
        f"{LAYER}.weight.absmax",
        "holds 32 torch.float32, must be 16 floats",
    ),
    "transposed": (
        state(shape=[64, 32]),
        STATE,
        "states shape (64, 32), the config asks for (32, 64)",
    ),
    "one dimension": (state(shape=[2048]), STATE, "shape.1: Field required"),
    "negative shape": (state(shape=[-32, -64]), STATE, "shape.0: must be positive"),
    "missing fact": (state(blocksize=None), STATE, "blocksize: Field required"),
    "unknown fact": (state(zero_point=1), STATE, "zero_point: Extra inputs are not permitted"),
    "nested without tensors": (
        state(nested_blocksize=256, nested_dtype="float32", nested_offset=0.5),
        STATE,
        "states double quantization True, the config asks for False",
    ),
    "partly nested": (
        state(nested_blocksize=256),
        STATE,
        "some of nested_blocksize, nested_dtype and nested_offset is missing",
    ),
}
DOUBLE: dict[str, tuple[Edit, str, str]] = {
    "truncated scales": (
        replaced("weight.absmax", lambda t: t[:-1].clone()),
        f"{LAYER}.weight.absmax",
        "holds 31 torch.uint8, must be 32 torch.uint8 with double quantization",
    ),
    "scales that are not quantized": (
        replaced("weight.absmax", torch.ones(32)),
        f"{LAYER}.weight.absmax",
        "holds 32 torch.float32, must be 32 torch.uint8",
    ),
    "outer scale that is no number": (
        set_at("weight.nested_absmax", 0, torch.nan),
        f"{LAYER}.weight.nested_absmax",
        "the first is nan at 0",
    ),
    "too many outer scales": (
        replaced("weight.nested_absmax", torch.ones(2)),
        f"{LAYER}.weight.nested_absmax",
        "holds 2 torch.float32, must be 1 floats",
    ),
    "short outer codebook": (
        replaced("weight.nested_quant_map", torch.ones(16)),
        f"{LAYER}.weight.nested_quant_map",
        "holds 16 torch.float32, must be 256 floats",
    ),
    "infinite offset": (
        replaced(
            "weight.quant_state.bitsandbytes__nf4",
            text(
                '{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [32, 64], '
                '"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": NaN}'
            ),
        ),
        STATE,
        "nested_offset: Input should be a finite number",
    ),
    "offset beyond float32": (
        state(nested_offset=1e300),
        f"{LAYER}.weight.absmax",
        "holds scales that are infinite",
    ),
    "plain state": (
        state(nested_blocksize=None, nested_dtype=None, nested_offset=None),
        STATE,
        "states double quantization False, the config asks for True",
    ),
}
INT8: dict[str, tuple[Edit, str, str]] = {
    "tiled rows": (
        replaced("weight_format", torch.tensor(2).byte()),
        f"{LAYER}.weight_format",
        "is 2, must be 0 for rows in order",
    ),
    "scale that is no number": (
        set_at("SCB", 3, torch.nan),
        f"{LAYER}.SCB",
        "holds 1 scales that are negative, infinite or not a number, the first one nan for output",
    ),
}
CASES = [
    pytest.param(name, *case, id=f"{name}, {label}")
    for name, cases in (("nf4", PLAIN), ("nf4-double", DOUBLE), ("int8", INT8))
    for label, case in cases.items()
]


@pytest.mark.parametrize(("name", "edit", "tensor", "reason"), CASES)
def test_tensor_is_refused_with_its_name(
    name: str, edit: Edit, tensor: str, reason: str, copied: Callable[[str], Path]
) -> None:
    path = copied(name)
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load(path)
    assert caught.value.path == tensor
    assert reason in caught.value.reason
    assert caught.value.mend


MISSING = ("weight", "weight.absmax", "weight.nested_quant_map")


@pytest.mark.parametrize("name", [*MISSING, "weight.quant_state.bitsandbytes__nf4"])
def test_missing_tensor_is_refused_with_its_name(name: str, copied: Callable[[str], Path]) -> None:
    path = copied("nf4-double")
    tensors = load_file(path / "model.safetensors")
    del tensors[f"{LAYER}.{name}"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"lacks the tensor '{LAYER}.{name}'"):
        load(path)


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("bnb_4bit_quant_type", "fp4", "quant_state.bitsandbytes__nf4', which the model has no"),
        ("bnb_4bit_use_double_quant", True, r"lacks the tensor '.*\.weight\.nested_absmax'"),
        ("llm_int8_skip_modules", ["o_proj"], r"o_proj\.weight' has shape \[2048, 1\], the config"),
    ],
)
def test_config_that_contradicts_the_tensors_is_refused(
    setting: str, value: object, reason: str, copied: Callable[[str], Path]
) -> None:
    path = copied("nf4")
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"][setting] = value
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=reason):
        load(path)


def test_int8_weights_without_weight_format_are_read_in_row_order(
    copied: Callable[[str], Path],
) -> None:
    path = copied("int8")
    expected = load(path, dtype="float32").logits([1, 2, 3])
    tensors = load_file(path / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not name.endswith("weight_format")}
    assert len(kept) == len(tensors) - 7
    save_file(kept, path / "model.safetensors")
    assert torch.equal(load(path, dtype="float32").logits([1, 2, 3]), expected)
