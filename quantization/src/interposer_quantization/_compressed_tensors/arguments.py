"""Models of the quantization arguments that compressed-tensors writes for weights and for inputs.

Field names and defaults follow ``QuantizationArgs`` of compressed-tensors 0.20; ``actorder`` also
accepts the values of earlier releases.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, model_validator

from interposer_quantization._compressed_tensors.stored import MX_GROUP, Inputs, Weights
from interposer_quantization._settings_model import SettingsModel

_GROUPED = ("group", "tensor_group")


class _Arguments(SettingsModel):
    num_bits: Literal[1, 2, 3, 4, 5, 6, 7, 8] = 8
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "token", "group", "block", "tensor_group"] | None = None
    group_size: int | None = None
    block_structure: Annotated[list[PositiveInt], Field(min_length=2, max_length=2)] | None = None
    scale_dtype: (
        Literal[
            "torch.float32",
            "torch.bfloat16",
            "torch.float16",
            "torch.uint8",
            "torch.float8_e4m3fn",
        ]
        | None
    ) = None
    zp_dtype: Literal["torch.int8", "torch.uint8", "torch.float8_e4m3fn"] | None = None
    # The calibration method has no effect on the stored tensors.
    observer: str | None = None
    observer_kwargs: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _coherent(self) -> _Arguments:
        size, strategy = self.group_size, self._strategy
        # -1 is an explicit "no groups".
        grouped = size is not None and size > 0
        if (strategy in _GROUPED) != grouped or not (grouped or size in (None, -1)):
            raise ValueError(
                f"strategy {strategy!r} does not go with group_size {size!r}; 'group' and "
                "'tensor_group' take a positive one, the others null or -1"
            )
        if (strategy == "block") != (self.block_structure is not None):
            raise ValueError(
                f"strategy {strategy!r} does not go with block_structure {self.block_structure}; "
                "'block' takes rows and columns, the others null"
            )
        if not self.symmetric and self.zp_dtype not in (None, "torch.int8"):
            raise ValueError(f"zero points of zp_dtype {self.zp_dtype!r}; 'torch.int8' is read")
        # uint8 scales are E8M0 exponents, which only the microscaling formats use.
        exponents = self.scale_dtype == "torch.uint8"
        if exponents and not (self.type == "float" and size == MX_GROUP and strategy == "group"):
            raise ValueError(
                f"scale_dtype 'torch.uint8' goes with floats in groups of {MX_GROUP} only"
            )
        # Booleans: a > b means a without b.
        if (self.scale_dtype == "torch.float8_e4m3fn") > (strategy == "tensor_group"):
            raise ValueError("scale_dtype 'torch.float8_e4m3fn' goes with 'tensor_group' only")
        return self

    @property
    def _strategy(self) -> str:
        """Return the granularity ``strategy``; the default is implied by the group size."""
        if self.strategy is not None:
            return self.strategy
        size = self.group_size
        return "tensor" if size is None else "channel" if size == -1 else "group"

    @property
    def _size(self) -> tuple[int, int] | None:
        if self.block_structure is not None:
            return self.block_structure[0], self.block_structure[1]
        return (1, self.group_size or 0) if self._strategy in _GROUPED else None


class WeightArguments(_Arguments):
    """Quantization of the weights of a group of layers."""

    dynamic: Literal[False] = False
    actorder: Literal["weight", "static", "group", "dynamic", False] | None = None

    def read(self) -> Weights:
        """Return the storage format of the weights."""
        # Only these two values of actorder store the group index of every input.
        reordered = self.actorder in ("group", "dynamic") and self._strategy == "group"
        return Weights(
            self.type, self.num_bits, self.symmetric, self._strategy, self._size, reordered
        )


class InputArguments(_Arguments):
    """Quantization of the inputs of a group of layers."""

    dynamic: Literal[False, True, "local"] = False
    actorder: Literal[False] | None = None

    @model_validator(mode="after")
    def _valid_for_inputs(self) -> InputArguments:
        is_local = self.dynamic == "local"
        if is_local != (self._strategy == "tensor_group"):
            raise ValueError(
                f"strategy {self._strategy!r} does not go with dynamic {self.dynamic!r}; "
                "'local' and 'tensor_group' go together"
            )
        if self._strategy in ("channel", "block") or (
            self._strategy == "token" and not self.dynamic
        ):
            raise ValueError(
                f"strategy {self._strategy!r} with dynamic {self.dynamic!r} is not supported for "
                "inputs"
            )
        return self

    def read(self) -> Inputs:
        """Return the quantization of the inputs.

        A dynamic per-tensor scale depends on the other tokens of the batch. One scale per token is
        used instead, and is also more precise.
        """
        is_dynamic = self.dynamic is not False
        uses_token_scales = self._strategy == "tensor" and is_dynamic and self.type == "float"
        return Inputs(
            self.type,
            self.num_bits,
            self.symmetric,
            "token" if uses_token_scales else self._strategy,
            self._size,
            static=not is_dynamic,
            exponents=self.scale_dtype == "torch.uint8",
        )


class CacheArguments(_Arguments):
    """Quantization of the KV cache to 8 bits, with one scale per layer or per KV head."""

    num_bits: Literal[8] = 8
    symmetric: Literal[True] = True
    strategy: Literal["tensor", "attn_head"] | None = None  # type: ignore[assignment]
    dynamic: Literal[False] = False
    actorder: Literal[False] | None = None

    @model_validator(mode="after")
    def _valid_for_cache(self) -> CacheArguments:
        if self._strategy not in ("tensor", "attn_head"):
            raise ValueError(f"strategy {self._strategy!r}; a cache takes 'tensor' or 'attn_head'")
        return self
