"""Storage format of one compressed-tensors linear layer, and the supported formats."""

from __future__ import annotations

from dataclasses import dataclass

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)
"""Supported layer formats."""

NVFP4_GROUP = 16
MX_GROUP = 32


@dataclass(frozen=True, slots=True)
class Numbers:
    """Number format of quantized values, and the granularity of their scales.

    Attributes:
        kind: ``"int"`` or ``"float"``.
        strategy: scope of a scale: ``"tensor"``, ``"channel"``, ``"token"``, ``"group"``,
            ``"block"`` or ``"tensor_group"``.
        size: rows and columns of a block, or 1 and the inputs of a group; None for other
            strategies.
    """

    kind: str
    bits: int
    symmetric: bool
    strategy: str
    size: tuple[int, int] | None

    @property
    def inputs_per_scale(self) -> int | None:
        """Return the inputs per group or the columns per block; None for other granularities."""
        return None if self.size is None else self.size[1]

    def __str__(self) -> str:
        rows, columns = self.size or (0, 0)
        scales = {
            "tensor": "with one scale",
            "channel": "per output",
            "token": "per token",
            "block": f"per block of {rows} by {columns}",
        }
        granularity = scales.get(self.strategy, f"per group of {columns} inputs")
        return f"{self.kind}{self.bits} {granularity}{'' if self.symmetric else ', asymmetric'}"


@dataclass(frozen=True, slots=True)
class Weights(Numbers):
    """Quantization of weights; ``reordered`` means that a tensor stores the group of each input."""

    reordered: bool

    def __str__(self) -> str:
        # Not super(): slots=True creates a new class, which breaks zero-argument super().
        return Numbers.__str__(self) + (", with act order" if self.reordered else "")


@dataclass(frozen=True, slots=True)
class Inputs(Numbers):
    """Quantization of inputs.

    Attributes:
        static: the checkpoint stores the scale. For ``tensor_group`` it stores the global scale
            only; group scales are computed at run time.
        exponents: scales are powers of two.
    """

    static: bool
    exponents: bool

    def __str__(self) -> str:
        return Numbers.__str__(self) + (" that is stored" if self.static else "")


@dataclass(frozen=True, slots=True)
class Stored:
    """Storage format of a layer: packing, weights, and inputs (None if inputs are unquantized)."""

    form: str
    weights: Weights
    inputs: Inputs | None

    def __str__(self) -> str:
        inputs = "" if self.inputs is None else f", inputs {self.inputs}"
        return f"{self.weights}{inputs} ({self.form})"

    @property
    def has_quantized_matmul(self) -> bool:
        """Return whether an op multiplies these quantized weights by quantized inputs.

        If not, inputs are fake-quantized and the matmul runs in the model's dtype.
        """
        weights, inputs = self.weights, self.inputs
        if inputs is None or inputs.kind != weights.kind:
            return False
        if weights.kind == "int":
            is_unpacked = self.form in ("int-quantized", "naive-quantized")
            has_output_scales = weights.strategy in ("tensor", "channel") and weights.symmetric
            return inputs.bits == 8 and (weights.bits <= 4 or (is_unpacked and has_output_scales))
        if inputs.bits != weights.bits:
            return False
        if weights.strategy in ("tensor", "channel"):
            return inputs.strategy in ("tensor", "token")
        if inputs.inputs_per_scale != weights.inputs_per_scale:
            return False
        needs_exponents = self.form == "mxfp8-quantized"
        return self.form != "mxfp4-pack-quantized" and inputs.exponents == needs_exponents


def unsupported_reason(stored: Stored) -> str | None:
    """Return the reason why a layer's storage format is not supported, or None if supported."""
    weights, inputs = stored.weights, stored.inputs
    if not _can_store(stored.form, weights):
        return f"the format {stored.form!r} does not store weights of {weights}"
    if inputs is None:
        return None
    if not _is_supported(inputs):
        return f"no op quantizes inputs to {inputs}"
    if (inputs.static or inputs.strategy == "tensor_group") and not stored.has_quantized_matmul:
        return f"no op multiplies inputs of {inputs} by weights of {weights}"
    return None


def _can_store(form: str, weights: Weights) -> bool:
    """Return whether the packing format ``form`` can store weights of this kind."""
    signature = (weights.kind, weights.bits, weights.strategy, weights.inputs_per_scale)
    if form == "nvfp4-pack-quantized":
        return signature == ("float", 4, "tensor_group", NVFP4_GROUP) and weights.symmetric
    if form == "mxfp4-pack-quantized":
        return signature == ("float", 4, "group", MX_GROUP) and weights.symmetric
    if form == "mxfp8-quantized":
        return signature == ("float", 8, "group", MX_GROUP) and weights.symmetric
    if weights.kind == "int":
        strategies = ("tensor", "channel", "group")
        if form == "pack-quantized":
            # The zero point of a whole tensor is not packed.
            return weights.strategy in strategies[0 if weights.symmetric else 1 :]
        is_unpacked = form in ("int-quantized", "naive-quantized")
        return is_unpacked and weights.strategy in strategies and not weights.reordered
    is_known_strategy = weights.strategy in ("tensor", "channel", "group", "block")
    is_fp8 = weights.bits == 8 and weights.symmetric and is_known_strategy
    return is_fp8 and form in ("float-quantized", "naive-quantized")


def _is_supported(inputs: Inputs) -> bool:
    """Return whether an op exists that quantizes inputs to this format."""
    if inputs.kind == "int":
        required_strategy = "tensor" if inputs.static else "token"
        return inputs.bits == 8 and inputs.strategy == required_strategy
    if not inputs.symmetric:
        return False
    if inputs.strategy in ("tensor", "token"):
        return inputs.bits == 8
    if inputs.strategy == "tensor_group":
        return inputs.bits == 4 and inputs.inputs_per_scale == NVFP4_GROUP
    if inputs.static or inputs.strategy != "group":
        return False
    return inputs.exponents if inputs.bits == 4 else inputs.bits == 8
