"""Linear layers with unsigned quantized weights packed into int32, as in GPTQ and AWQ.

Dimensions: I input features, O output features, G groups, P fused layers.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from interposer import LinearMethod, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_quantization._compressed_tensors.parameters import count_groups
from interposer_quantization._weights.int_packing import to_kernel_layout
from interposer_quantization._weights.weight_only import bind_weight_only, matmul_sorted_inputs

_STORED = ("qweight", "qzeros", "scales", "g_idx")


class PackedLinear(LinearMethod):
    """Linear method for packed ``qweight`` and ``qzeros`` with ``scales`` ``[G, O]``.

    weight = (quantized value - zero point) * scale, with zero point and scale of its group.
    ``finalize`` repacks the weights once for the kernel and frees the stored tensors. Scales are
    kept in float32, which represents the scales of every checkpoint exactly.

    Args:
        bits: of a quantized value, 4 or 8.
        group_size: inputs that share a scale; None means all inputs.
        symmetric: every zero point is the midpoint, so kernels need no zero points.
    Attributes:
        middles: stored zero points that are accepted as the midpoint.
    """

    def __init__(self, bits: int, group_size: int | None, symmetric: bool) -> None:
        self.bits = bits
        self.group_size = group_size
        self.symmetric = symmetric
        self.values_per_word = 32 // bits
        self.middle = 1 << bits - 1
        self.middles: tuple[int, ...] = (self.middle,)

    @abstractmethod
    def packed_weight_shape(self, in_features: int, out_features: int) -> tuple[int, int, int]:
        """Return the two sizes of ``qweight`` and the output dimension."""

    @abstractmethod
    def unpack_weight(self, qweight: torch.Tensor) -> torch.Tensor:
        """Unpack ``qweight`` to quantized values ``[O, I]`` uint8."""

    @abstractmethod
    def unpack_zero_points(self, qzeros: torch.Tensor) -> torch.Tensor:
        """Unpack ``qzeros`` to zero points ``[G, O]`` uint8."""

    @abstractmethod
    def pack_zero_points(self, zero_points: torch.Tensor) -> torch.Tensor:
        """Pack zero points ``[G, O]`` uint8 into ``qzeros``."""

    def groups(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the group of each input ``[I]`` int64, or None if groups are consecutive.

        Raises: CheckpointError: the stored group indices are invalid.
        """
        return None

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``qweight``, ``qzeros``, ``scales`` and, if requested, ``bias``.

        Raises: ConfigError: the group size or the int32 packing does not divide the layer's sizes.
        """
        self.prefix = site.prefix
        # A layer that fuses nothing is its own single part.
        self.parts: Mapping[str, int] = getattr(layer, "parts", None) or {
            site.prefix.rpartition(".")[2]: out_features
        }
        size = self.group_size or in_features
        self.num_groups = num_groups = count_groups(site, in_features, size)
        self._check_words(in_features)
        self.bound = bind_weight_only(
            site, self.bits, in_features, out_features, size, not self.symmetric, biased=bias
        )
        # dim: tensor parallelism shards the outputs along this dimension.
        *shape, dim = self.packed_weight_shape(in_features, out_features)
        register_stored(layer, "qweight", torch.empty(shape, dtype=torch.int32), shard_dim=dim)
        zeros = torch.empty(num_groups, out_features // self.values_per_word, dtype=torch.int32)
        # Random test weights can have any zero point, unless symmetry fixes all of them.
        sampler = (
            {"sample": self._middle_zero_points_sampler(zeros.shape)} if self.symmetric else {}
        )
        register_stored(layer, "qzeros", zeros, shard_dim=1, **sampler)
        scales = torch.empty(num_groups, out_features, dtype=torch.float32)
        register_stored(layer, "scales", scales, shard_dim=1)
        offset = torch.empty(out_features, dtype=site.dtype) if bias else None
        register_stored(layer, "bias", offset)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: (quantized value - zero point) * scale."""
        quantized = self.unpack_weight(layer.get_parameter("qweight")).double()
        zeros = self.unpack_zero_points(layer.get_parameter("qzeros")).double()
        if self.symmetric:
            zeros.fill_(self.middle)
        scales = layer.get_parameter("scales").double()
        groups = self.groups(layer)
        if groups is None:
            size = quantized.shape[1] // len(scales)
            # Consecutive groups.
            groups = torch.arange(quantized.shape[1], device=quantized.device) // size
        return (quantized - zeros[groups].T) * scales[groups].T

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Repack the weights once for the kernel; return the kernel and constants.

        If the groups are not consecutive, the weight's inputs are sorted by group here, and the
        features of ``x`` on every call.

        Raises: CheckpointError: a tensor holds values that no weight can be computed from.
        """
        scales = layer.get_parameter("scales")
        self._check_scales(scales)
        zeros = self.unpack_zero_points(layer.get_parameter("qzeros"))
        if self.symmetric:
            self._check_symmetric(zeros)
        groups = self.groups(layer)
        quantized = self.unpack_weight(layer.get_parameter("qweight"))
        # A stable sort keeps the inputs of one group in their original order.
        order = None if groups is None else groups.argsort(stable=True)
        if order is not None:
            quantized = quantized.index_select(1, order)
        bias = layer._parameters["bias"]
        constants = {
            "weight": to_kernel_layout(quantized, self.bits),
            "scale": scales.T.contiguous(),
            "bias": bias,
            "zero_points": None if self.symmetric else self._kernel_zeros(zeros),
        }
        # Free the stored tensors before the kernel prepares its own copy: at most two copies exist.
        del quantized, scales, zeros
        for name in _STORED:
            if name in layer._parameters:
                layer.register_parameter(name, None)
        prepared = self.bound.prepared(**constants)
        # The kernel made its own copy of the bias.
        if prepared["bias"] is not bias:
            layer.register_parameter("bias", None)
        operands = tuple(prepared[name] for name in constants)
        if order is None:
            return self.bound.function, operands
        return partial(matmul_sorted_inputs, self.bound.function), (order, *operands)

    def tensor_names(self, name: str) -> list[str]:
        """Return the checkpoint's names of the tensor ``name``, one per fused layer."""
        parent = self.prefix.rpartition(".")[0]
        return [f"{parent}.{part}.{name}" if parent else f"{part}.{name}" for part in self.parts]

    def tensor_name(self, name: str, output: int) -> str:
        """Return the checkpoint's name of the tensor ``name`` that holds the given output."""
        # Output offsets at which the fused layers end.
        stops = list(accumulate(self.parts.values()))
        return self.tensor_names(name)[bisect_right(stops, output)]

    def _check_words(self, in_features: int) -> None:
        """Raise ConfigError unless the values of every fused layer fill whole int32 words."""
        for part, size in self.parts.items():
            shape = self.packed_weight_shape(in_features, size)[:2]
            capacity = shape[0] * shape[1] * self.values_per_word
            if size % self.values_per_word or capacity != in_features * size:
                raise ConfigError(
                    f"{self.prefix}: {part} has {in_features} inputs and {size} outputs, which do "
                    f"not fill words of {self.values_per_word} values. Try: leave the layer plain"
                )

    def _middle_zero_points_sampler(
        self, shape: torch.Size
    ) -> Callable[[torch.Generator], torch.Tensor]:
        """Return a sampler of ``qzeros`` in which every zero point is the midpoint."""
        rows, columns = shape[0], shape[1] * self.values_per_word

        def sample(_: torch.Generator) -> torch.Tensor:
            return self.pack_zero_points(
                torch.full((rows, columns), self.middle, dtype=torch.uint8)
            )

        return sample

    def _kernel_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        """Return the zero points ``[O, G]`` in the kernel's form: uint8, or int8 minus 128."""
        transposed = zeros.T.contiguous()
        return transposed if self.bits == 4 else to_kernel_layout(transposed, self.bits)

    def _check_scales(self, scales: torch.Tensor) -> None:
        is_bad = ~scales.isfinite() | (scales == 0)
        if is_bad.any():
            group, output = (int(index) for index in is_bad.nonzero()[0])
            raise CheckpointError(
                self.tensor_name("scales", output),
                f"holds {int(is_bad.sum())} scales of the layer that are zero, infinite or not a "
                f"number, the first one {float(scales[group, output])} for group {group}",
                "copy the checkpoint again, or quantize again with scales in a wider dtype",
            )

    def _check_symmetric(self, zeros: torch.Tensor) -> None:
        if not any((zeros == middle).all() for middle in self.middles):
            is_wrong = zeros != self.middle
            group, output = (int(index) for index in is_wrong.nonzero()[0])
            raise CheckpointError(
                self.tensor_name("qzeros", output),
                f"holds the zero point {int(zeros[group, output])} for group {group}, but all are "
                f"{self.middle} where quantization_config says that weights are symmetric",
                "correct the quantization_config if the zero points are right",
            )


def register_stored(
    layer: nn.Module, name: str, tensor: torch.Tensor | None, **attributes: object
) -> None:
    """Register a parameter with loader attributes such as ``shard_dim``."""
    parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
    if parameter is not None:
        parameter.__dict__.update(attributes)
    layer.register_parameter(name, parameter)
