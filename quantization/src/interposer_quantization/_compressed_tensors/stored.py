"""Storage of one linear layer by compressed-tensors, and the formats that are read."""

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
"""The formats of layers that are read."""

NVFP4_GROUP = 16
MX_GROUP = 32


@dataclass(frozen=True, slots=True)
class Numbers:
    """Integers or floats of a few bits, and what shares one of their scales.

    Attributes:
        kind: ``"int"`` or ``"float"``.
        strategy: what shares a scale: ``"tensor"``, ``"channel"``, ``"token"``, ``"group"``,
            ``"block"`` or ``"tensor_group"``.
        size: rows and columns of a block, 1 and the inputs of a group; None for the rest.
    """

    kind: str
    bits: int
    symmetric: bool
    strategy: str
    size: tuple[int, int] | None

    @property
    def inputs_per_scale(self) -> int | None:
        """Return the size of groups or the columns of blocks, None where there are neither."""
        return None if self.size is None else self.size[1]

    def __str__(self) -> str:
        rows, columns = self.size or (0, 0)
        scales = {
            "tensor": "with one scale",
            "channel": "per output",
            "token": "per token",
            "block": f"per block of {rows} by {columns}",
        }
        shared = scales.get(self.strategy, f"per group of {columns} inputs")
        return f"{self.kind}{self.bits} {shared}{'' if self.symmetric else ', asymmetric'}"


@dataclass(frozen=True, slots=True)
class Weights(Numbers):
    """Weights; ``reordered`` says that a tensor names the group of each input."""

    reordered: bool

    def __str__(self) -> str:
        # The parent's by name: a dataclass with slots is a new class, which super() misses.
        return Numbers.__str__(self) + (", with act order" if self.reordered else "")


@dataclass(frozen=True, slots=True)
class Inputs(Numbers):
    """Inputs; ``static`` says that the checkpoint holds their scale.

    Of ``tensor_group`` it holds one of two, the other is found on the way. ``exponents`` says
    that scales are powers of two.
    """

    static: bool
    exponents: bool

    def __str__(self) -> str:
        return Numbers.__str__(self) + (" that is stored" if self.static else "")


@dataclass(frozen=True, slots=True)
class Stored:
    """The format of a layer, its weights and, where they are quantized, its inputs."""

    form: str
    weights: Weights
    inputs: Inputs | None

    def __str__(self) -> str:
        inputs = "" if self.inputs is None else f", inputs {self.inputs}"
        return f"{self.weights}{inputs} ({self.form})"

    @property
    def whole_product(self) -> bool:
        """Return whether an op multiplies these weights by these inputs, both quantized.

        Elsewhere inputs are rounded and multiplied in the model's dtype.
        """
        weights, inputs = self.weights, self.inputs
        if inputs is None or inputs.kind != weights.kind:
            return False
        if weights.kind == "int":
            plain = self.form in ("int-quantized", "naive-quantized")
            by_output = weights.strategy in ("tensor", "channel") and weights.symmetric
            return inputs.bits == 8 and (weights.bits <= 4 or (plain and by_output))
        if inputs.bits != weights.bits:
            return False
        if weights.strategy in ("tensor", "channel"):
            return inputs.strategy in ("tensor", "token")
        if inputs.inputs_per_scale != weights.inputs_per_scale:
            return False
        exponents = self.form == "mxfp8-quantized"
        return self.form != "mxfp4-pack-quantized" and inputs.exponents == exponents


def refusal(stored: Stored) -> str | None:
    """Return why a layer that is stored so cannot be read, None if it can."""
    weights, inputs = stored.weights, stored.inputs
    if not _fits(stored.form, weights):
        return f"weights of {weights} are not what the format {stored.form!r} stores"
    if inputs is None:
        return None
    if not _known(inputs):
        return f"no op quantizes inputs to {inputs}"
    if (inputs.static or inputs.strategy == "tensor_group") and not stored.whole_product:
        return f"no op multiplies inputs of {inputs} by weights of {weights}"
    return None


def _fits(form: str, weights: Weights) -> bool:
    """Say whether the format stores such weights."""
    numbers = (weights.kind, weights.bits, weights.strategy, weights.inputs_per_scale)
    if form == "nvfp4-pack-quantized":
        return numbers == ("float", 4, "tensor_group", NVFP4_GROUP) and weights.symmetric
    if form == "mxfp4-pack-quantized":
        return numbers == ("float", 4, "group", MX_GROUP) and weights.symmetric
    if form == "mxfp8-quantized":
        return numbers == ("float", 8, "group", MX_GROUP) and weights.symmetric
    if weights.kind == "int":
        strategies = ("tensor", "channel", "group")
        if form == "pack-quantized":
            # The zero point of a whole tensor is not packed.
            return weights.strategy in strategies[0 if weights.symmetric else 1 :]
        plain = form in ("int-quantized", "naive-quantized")
        return plain and weights.strategy in strategies and not weights.reordered
    shared = weights.strategy in ("tensor", "channel", "group", "block")
    fits = weights.bits == 8 and weights.symmetric and shared
    return fits and form in ("float-quantized", "naive-quantized")


def _known(inputs: Inputs) -> bool:
    """Say whether an op quantizes to such inputs."""
    if inputs.kind == "int":
        wanted = "tensor" if inputs.static else "token"
        return inputs.bits == 8 and inputs.strategy == wanted
    if not inputs.symmetric:
        return False
    if inputs.strategy in ("tensor", "token"):
        return inputs.bits == 8
    if inputs.strategy == "tensor_group":
        return inputs.bits == 4 and inputs.inputs_per_scale == NVFP4_GROUP
    if inputs.static or inputs.strategy != "group":
        return False
    return inputs.exponents if inputs.bits == 4 else inputs.bits == 8
