"""Routed experts whose matrices are unsigned codes in words, as GPTQ and AWQ store linear layers.

Dimensions: E experts, H hidden size, I intermediate size, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_ops.experts import fused_experts_w4a16
from interposer_quantization._compressed_tensors.parameters import number_of_groups
from interposer_quantization._experts.separate import Projection, check_scales, projections_of
from interposer_quantization._weights.int_packing import kernel_codes
from interposer_quantization._weights.packed_linear import PackedLinear

_BITS = 4


class PackedExperts(ExpertsMethod):
    """``qweight``, ``qzeros`` and ``scales`` of every matrix, as a format has those of a layer.

    Zero points are the middle code. The op takes scales in the model's dtype, so those that are
    stored wider are rounded to it.

    Args:
        form: what reads the words of one matrix.
        group_size: inputs that share a scale.
        indexed: ``g_idx``, the groups of a matrix' inputs, may be stored: they follow each other.
    """

    def __init__(self, form: PackedLinear, group_size: int, indexed: bool) -> None:
        self.form = form
        self.group_size = group_size
        self.indexed = indexed

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register what is stored of all experts; the rows of a matrix follow those of others.

        Raises: ConfigError: groups or words do not divide the matrices, or these are stored
            together.
        """
        self.prefix, self.dtype = site.prefix, site.dtype
        self.projections = projections_of(site, spec)
        self.bound = site.bind_kernel(
            fused_experts_w4a16,
            **{name: value for name, value in spec.dims().items() if name != "biased"},
            group_size=self.group_size,
        )
        per_word, count = self.form.codes_per_word, spec.num_experts
        for projection in self.projections:
            inputs, outputs, parts = projection.inputs, projection.outputs, len(projection.parts)
            groups = number_of_groups(site, inputs, self.group_size)
            if inputs % per_word or outputs % per_word:
                raise ConfigError(
                    f"{site.prefix}: matrices of {outputs} x {inputs} numbers do not fill words of "
                    f"{per_word} codes. Try: leave the experts plain"
                )
            rows, columns, _ = self.form.weight_words(inputs, outputs)
            words = torch.empty(count, parts * rows, columns, dtype=torch.int32)
            projection.register(layer, "qweight", words)
            zeros = torch.empty(count, parts * groups, outputs // per_word, dtype=torch.int32)
            projection.register(layer, "qzeros", zeros, self._middle_words(zeros.shape))
            scales = torch.empty(count, parts * groups, outputs, dtype=torch.float32)
            projection.register(layer, "scales", scales)
            if self.indexed:
                self._register_order(layer, projection, count)

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float64 matrices: each code less the middle one, times its scale."""
        gate_up, down = (self._product(layer, projection) for projection in self.projections)
        return gate_up, down

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the bound kernel with its constants, after the one repacking of the words.

        Raises: CheckpointError: a scale is zero or not finite, a zero point is not the middle code,
            or groups do not follow each other.
        """
        constants: dict[str, torch.Tensor] = {}
        for projection in self.projections:
            self._check_zeros(projection, projection.taken(layer, "qzeros"))
            if self.indexed:
                self._check_order(projection, projection.taken(layer, "g_idx"))
            scales = projection.taken(layer, "scales")
            check_scales(projection, self.prefix, "scales", scales)
            words = projection.taken(layer, "qweight")
            shape = len(words), projection.all_outputs, projection.inputs // 2
            codes = torch.empty(shape, dtype=torch.uint8, device=words.device)
            for expert, packed in enumerate(words):
                codes[expert] = kernel_codes(self._codes(projection, packed), _BITS)
            constants[projection.name] = codes
            constants[f"{projection.name}_scale"] = self._by_output(projection, scales)
        prepared = self.bound.prepared(**constants)
        return self.bound.function, tuple(prepared[name] for name in constants)

    def _codes(self, projection: Projection, words: torch.Tensor) -> torch.Tensor:
        """Return the codes ``[outputs, inputs]`` uint8 of one expert, gates first."""
        matrices = words.chunk(len(projection.parts))
        return torch.cat([self.form.weight_codes(matrix) for matrix in matrices])

    def _by_output(self, projection: Projection, scales: torch.Tensor) -> torch.Tensor:
        """Return ``[E, outputs, G]`` in the model's dtype of ``[E, parts * G, outputs]``."""
        parts = scales.to(self.dtype).unflatten(1, (len(projection.parts), -1))
        by_output: torch.Tensor = parts.transpose(2, 3).flatten(1, 2).contiguous()
        return by_output

    def _product(self, layer: nn.Module, projection: Projection) -> torch.Tensor:
        words = layer.get_parameter(f"{projection.name}_qweight").data
        scales = self._by_output(projection, layer.get_parameter(f"{projection.name}_scales").data)
        codes = torch.stack([self._codes(projection, packed) for packed in words]).double()
        grouped = (codes - self.form.middle).unflatten(-1, (scales.shape[-1], -1))
        # As the op takes them.
        matrices: torch.Tensor = (grouped * scales.double()[..., None]).flatten(-2)
        return matrices

    def _register_order(self, layer: nn.Module, projection: Projection, count: int) -> None:
        """Register ``g_idx``; some writers leave it out where groups follow each other."""
        order = self._in_order(projection).expand(count, -1)
        empty = torch.empty(order.shape, dtype=torch.int32)
        projection.register(layer, "g_idx", empty, lambda _: order)
        held: Any = layer.get_parameter(f"{projection.name}_g_idx")
        held.default = lambda: order

    def _in_order(self, projection: Projection) -> torch.Tensor:
        """Return the groups that follow each other, of the inputs of all parts."""
        groups = torch.arange(projection.inputs, device="cpu", dtype=torch.int32) // self.group_size
        return groups.repeat(len(projection.parts))

    def _middle_words(self, shape: torch.Size) -> Callable[[torch.Generator], torch.Tensor]:
        """Return a function of a generator that returns words of middle zero points."""
        count, rows, columns = shape
        codes = torch.full(
            (rows, columns * self.form.codes_per_word), self.form.middle, device="cpu"
        )
        words = self.form.zero_words(codes.to(torch.uint8)).expand(count, -1, -1)
        return lambda _: words

    def _check_zeros(self, projection: Projection, zeros: torch.Tensor) -> None:
        codes = self.form.zero_codes(zeros)
        if any((codes == middle).all() for middle in self.form.middles):
            return
        expert, row, output = (int(place) for place in (codes != self.form.middle).nonzero()[0])
        raise CheckpointError(
            projection.tensor_name(self.prefix, expert, row, codes.shape[1], "qzeros"),
            f"holds the zero point {int(codes[expert, row, output])}, but all are "
            f"{self.form.middle} where quantization_config says that weights are symmetric",
            "correct the quantization_config if the zero points are right; experts with zero "
            "points are not read",
        )

    def _check_order(self, projection: Projection, groups: torch.Tensor) -> None:
        wrong = groups != self._in_order(projection).to(groups.device)
        if wrong.any():
            expert, place = (int(index) for index in wrong.nonzero()[0])
            raise CheckpointError(
                projection.tensor_name(self.prefix, expert, place, groups.shape[1], "g_idx"),
                f"holds the group {int(groups[expert, place])} for input "
                f"{place % projection.inputs}: groups of experts have to follow each other",
                "state 'desc_act': true in quantization_config: then they are sorted",
            )


def packed_experts(form: PackedLinear, indexed: bool) -> ExpertsMethod | None:
    """Return the method for experts of which all matrices are stored so, None without an op.

    Args:
        form: what reads the words of one matrix.
        indexed: groups of inputs may be stored.
    """
    if form.bits != _BITS or not form.symmetric or form.group_size is None:
        return None
    return PackedExperts(form, form.group_size, indexed)
