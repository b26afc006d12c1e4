"""Online FP8 scheme: float weights are quantized to float8_e4m3fn while they load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field, PositiveInt, model_validator

from interposer import LinearMethod
from interposer_quantization._fp8.block_linear import Fp8BlockLinear
from interposer_quantization._fp8.linear import Fp8RowLinear, Fp8TensorLinear
from interposer_quantization._online.fp8_linear import (
    Quantize,
    quantized_blocks,
    quantized_members,
    quantized_rows,
)
from interposer_quantization._online.head import HeadSettings, OnlineScheme
from interposer_quantization._online.linear import OnlineLinear

_SUPPORTED = """\
Supported: 'strategy' 'channel', 'tensor' or 'block', the latter with a 'weight_block_size' of two \
sizes; 'head' 'int8', 'int4' or 'plain' with a 'head_group_size' and 'head_activations'; layers \
left out by 'modules_to_not_convert'.
Try: load(..., quantization={"quant_method": "fp8", "strategy": "channel"})"""
_MEND = "name all of them in 'modules_to_not_convert', or none"


class OnlineFp8Settings(HeadSettings):
    """Settings of online FP8; strategy ``block`` has blocks of 128 x 128 by default."""

    supported: ClassVar[str] = _SUPPORTED
    quant_method: Literal["online_fp8"] = "online_fp8"
    strategy: Literal["channel", "tensor", "block"] = "channel"
    weight_block_size: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None

    @model_validator(mode="after")
    def _coherent(self) -> OnlineFp8Settings:
        if self.weight_block_size is not None and self.strategy != "block":
            raise ValueError(
                f"strategy {self.strategy!r} has no weight_block_size, which goes with 'block'"
            )
        return self


class OnlineFp8(OnlineScheme):
    """Scheme whose ``finalize`` quantizes weights to FP8; inputs are quantized at run time."""

    method = "online_fp8"
    settings_class = OnlineFp8Settings
    settings: OnlineFp8Settings
    mend = _MEND

    def _method(self, stored: str) -> LinearMethod:
        if self.settings.strategy == "channel":
            return _online(Fp8RowLinear(None), "weight_scale", quantized_rows)
        if self.settings.strategy == "tensor":
            return _online(Fp8TensorLinear("weight_scale"), "weight_scale", quantized_members)
        rows, columns = self.settings.weight_block_size or (128, 128)
        # Positional False: scales stay arbitrary float32, not powers of two.
        blocks = Fp8BlockLinear(rows, columns, False, "weight_scale_inv")
        return _online(blocks, "weight_scale_inv", quantized_blocks(rows, columns))


def _online(method: LinearMethod, scale_name: str, quantize: Quantize) -> OnlineLinear:
    """Return the online method that quantizes a float weight for ``method``."""

    def tensors(weight: torch.Tensor, sizes: Sequence[int]) -> Mapping[str, torch.Tensor]:
        quantized, scales = quantize(weight, sizes)
        return {"weight": quantized, scale_name: scales}

    return OnlineLinear(method, tensors)


def online_fp8_examples() -> Mapping[str, Mapping[str, Any]]:
    """Return online FP8 settings with every scale granularity, by label."""
    settings: Mapping[str, Mapping[str, Any]] = {
        "per output": {},
        "per tensor": {"strategy": "tensor", "modules_to_not_convert": ["lm_head"]},
        "blocks": {"strategy": "block"},
        "blocks of 64 by 32": {"strategy": "block", "weight_block_size": [64, 32]},
    }
    return {label: {"quant_method": "online_fp8", **fields} for label, fields in settings.items()}
