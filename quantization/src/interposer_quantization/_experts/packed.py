"""Routed experts of unsigned int4 matrices packed into int32, as GPTQ and AWQ store linear layers.

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
from interposer_quantization._compressed_tensors.parameters import count_groups
from interposer_quantization._experts.separate import Projection, check_scales, projections_of
from interposer_quantization._weights.int_packing import to_kernel_layout
from interposer_quantization._weights.packed_linear import PackedLinear

_BITS = 4


class PackedExperts(ExpertsMethod):
    """Experts method for ``qweight``, ``qzeros`` and ``scales`` per matrix.

    Every zero point must be the midpoint. Scales are rounded to the model's dtype, which the op
    takes.

    Args:
        form: linear method that unpacks one matrix.
        group_size: inputs that share a scale.
        indexed: the checkpoint may store ``g_idx``; its groups must be consecutive.
    """

    def __init__(self, form: PackedLinear, group_size: int, indexed: bool) -> None:
        self.form = form
        self.group_size = group_size
        self.indexed = indexed

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register the packed tensors of all experts; gate and up follow each other along the rows.

        Raises: ConfigError: groups or int32 packing do not divide the matrices, or one tensor holds
            the matrices of all experts.
        """
        self.prefix, self.dtype = site.prefix, site.dtype
        self.projections = projections_of(site, spec)
        self.bound = site.bind_kernel(
            fused_experts_w4a16,
            **{name: value for name, value in spec.dims().items() if name != "biased"},
            group_size=self.group_size,
        )
        per_word, count = self.form.values_per_word, spec.num_experts
        for projection in self.projections:
            inputs, outputs, parts = projection.inputs, projection.outputs, len(projection.parts)
            groups = count_groups(site, inputs, self.group_size)
            if inputs % per_word or outputs % per_word:
                raise ConfigError(
                    f"{site.prefix}: matrices of {outputs} x {inputs} numbers do not fill words of "
                    f"{per_word} values. Try: leave the experts plain"
                )
            rows, columns, _ = self.form.packed_weight_shape(inputs, outputs)
            words = torch.empty(count, parts * rows, columns, dtype=torch.int32)
            projection.register(layer, "qweight", words)
            zeros = torch.empty(count, parts * groups, outputs // per_word, dtype=torch.int32)
            projection.register(
                layer, "qzeros", zeros, self._middle_zero_points_sampler(zeros.shape)
            )
            scales = torch.empty(count, parts * groups, outputs, dtype=torch.float32)
            projection.register(layer, "scales", scales)
            if self.indexed:
                self._register_order(layer, projection, count)

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float64 matrices: (quantized value - midpoint) * scale."""
        gate_up, down = (self._dequantize(layer, projection) for projection in self.projections)
        return gate_up, down

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Repack the weights once for the kernel; return the kernel and constants.

        Raises: CheckpointError: a scale is zero or not finite, a zero point is not the midpoint, or
            groups are not consecutive.
        """
        constants: dict[str, torch.Tensor] = {}
        for projection in self.projections:
            self._check_zeros(projection, projection.pop(layer, "qzeros"))
            if self.indexed:
                self._check_order(projection, projection.pop(layer, "g_idx"))
            scales = projection.pop(layer, "scales")
            check_scales(projection, self.prefix, "scales", scales)
            words = projection.pop(layer, "qweight")
            shape = len(words), projection.all_outputs, projection.inputs // 2
            quantized = torch.empty(shape, dtype=torch.uint8, device=words.device)
            # Expert by expert, so that only one expert's weights are unpacked at a time.
            for expert, packed in enumerate(words):
                quantized[expert] = to_kernel_layout(self._unpack_expert(projection, packed), _BITS)
            constants[projection.name] = quantized
            constants[f"{projection.name}_scale"] = self._by_output(projection, scales)
        prepared = self.bound.prepared(**constants)
        return self.bound.function, tuple(prepared[name] for name in constants)

    def _unpack_expert(self, projection: Projection, words: torch.Tensor) -> torch.Tensor:
        """Unpack one expert's weight to ``[outputs, inputs]`` uint8, gate rows first."""
        matrices = words.chunk(len(projection.parts))
        return torch.cat([self.form.unpack_weight(matrix) for matrix in matrices])

    def _by_output(self, projection: Projection, scales: torch.Tensor) -> torch.Tensor:
        """Transpose scales to ``[E, outputs, G]`` in the model's dtype.

        Args:
            scales: ``[E, parts * G, outputs]``.
        """
        parts = scales.to(self.dtype).unflatten(1, (len(projection.parts), -1))
        by_output: torch.Tensor = parts.transpose(2, 3).flatten(1, 2).contiguous()
        return by_output

    def _dequantize(self, layer: nn.Module, projection: Projection) -> torch.Tensor:
        words = layer.get_parameter(f"{projection.name}_qweight").data
        scales = self._by_output(projection, layer.get_parameter(f"{projection.name}_scales").data)
        quantized = torch.stack(
            [self._unpack_expert(projection, packed) for packed in words]
        ).double()
        grouped = (quantized - self.form.middle).unflatten(-1, (scales.shape[-1], -1))
        # The op takes scales in the model's dtype.
        matrices: torch.Tensor = (grouped * scales.double()[..., None]).flatten(-2)
        return matrices

    def _register_order(self, layer: nn.Module, projection: Projection, count: int) -> None:
        """Register ``g_idx`` with consecutive groups as default: some checkpoints omit it."""
        order = self._consecutive_groups(projection).expand(count, -1)
        empty = torch.empty(order.shape, dtype=torch.int32)
        projection.register(layer, "g_idx", empty, lambda _: order)
        parameter: Any = layer.get_parameter(f"{projection.name}_g_idx")
        parameter.default = lambda: order

    def _consecutive_groups(self, projection: Projection) -> torch.Tensor:
        """Return consecutive group indices for the inputs of every fused matrix."""
        # On the CPU explicitly: the default device may be meta, and these values are needed.
        groups = torch.arange(projection.inputs, device="cpu", dtype=torch.int32) // self.group_size
        return groups.repeat(len(projection.parts))

    def _middle_zero_points_sampler(
        self, shape: torch.Size
    ) -> Callable[[torch.Generator], torch.Tensor]:
        """Return a sampler of ``qzeros`` in which every zero point is the midpoint."""
        count, rows, columns = shape
        quantized = torch.full(
            (rows, columns * self.form.values_per_word), self.form.middle, device="cpu"
        )
        words = self.form.pack_zero_points(quantized.to(torch.uint8)).expand(count, -1, -1)
        return lambda _: words

    def _check_zeros(self, projection: Projection, zeros: torch.Tensor) -> None:
        quantized = self.form.unpack_zero_points(zeros)
        if any((quantized == middle).all() for middle in self.form.middles):
            return
        expert, row, output = (int(place) for place in (quantized != self.form.middle).nonzero()[0])
        raise CheckpointError(
            projection.tensor_name(self.prefix, expert, row, quantized.shape[1], "qzeros"),
            f"holds the zero point {int(quantized[expert, row, output])}, but all are "
            f"{self.form.middle} where quantization_config says that weights are symmetric",
            "correct the quantization_config if the zero points are right; experts with zero "
            "points are not read",
        )

    def _check_order(self, projection: Projection, groups: torch.Tensor) -> None:
        is_wrong = groups != self._consecutive_groups(projection).to(groups.device)
        if is_wrong.any():
            expert, column = (int(index) for index in is_wrong.nonzero()[0])
            raise CheckpointError(
                projection.tensor_name(self.prefix, expert, column, groups.shape[1], "g_idx"),
                f"holds the group {int(groups[expert, column])} for input "
                f"{column % projection.inputs}: groups of experts have to follow each other",
                "state 'desc_act': true in quantization_config: then they are sorted",
            )


def packed_experts(form: PackedLinear, indexed: bool) -> ExpertsMethod | None:
    """Return the fused-op method for experts in this storage format, or None.

    Args:
        form: linear method that unpacks one matrix.
        indexed: the checkpoint may store ``g_idx``.
    """
    # The fused op takes symmetric 4-bit weights in groups only.
    if form.bits != _BITS or not form.symmetric or form.group_size is None:
        return None
    return PackedExperts(form, form.group_size, indexed)
