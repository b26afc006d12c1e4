"""Linear layers of integer weights of 1 to 8 bits packed into int32, inputs in the model's dtype.

Dimensions: I input features, O output features, G groups, P fused layers.
"""

from __future__ import annotations

import torch
from torch import nn

from interposer import Site
from interposer.errors import CheckpointError, ConfigError
from interposer_quantization._compressed_tensors.bits import count_words, unpack_bits
from interposer_quantization._compressed_tensors.int_linear import IntLinear
from interposer_quantization._compressed_tensors.stored import Inputs, Weights
from interposer_quantization._weights.input_groups import check_groups
from interposer_quantization._weights.int_packing import to_kernel_layout
from interposer_quantization._weights.packed_linear import register_stored

_WORD = 32
_FULL = (1, 2, 4, 8)


class PackedIntLinear(IntLinear):
    """Linear method for ``weight_packed`` ``[O, I * bits / 32]`` int32.

    ``weight_zero_point`` is ``[O * bits / 32, G]`` int32. Both store signed values plus half of
    their range. ``weight_shape`` repeats O and I; the optional ``weight_g_idx`` ``[I]`` holds the
    group of each input.

    ``finalize`` repacks the weight once for a 4-bit or an 8-bit op; narrower values are widened.
    """

    def __init__(self, weights: Weights, inputs: Inputs | None) -> None:
        super().__init__(weights, inputs)
        self.bits = weights.bits
        self.middle = 1 << self.bits - 1

    def register_quantized_weight(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register the packed weight, its shape and, if stored, zero points and group indices.

        Raises: ConfigError: an int32 spans two fused layers, or the packing is ambiguous.
        """
        self._check_words(site, in_features)
        num_parts = len(self.members.sizes)
        packed = torch.empty(out_features, count_words(in_features, self.bits), dtype=torch.int32)
        register_stored(layer, "weight_packed", packed)
        sizes = [[size, in_features] for size in self.members.sizes.values()]

        def shapes(_: torch.Generator) -> torch.Tensor:
            return torch.tensor(sizes).flatten()

        shape = torch.empty(2 * num_parts, dtype=torch.int64)
        attributes = {"per_part": True, "states_sizes": True, "sample": shapes}
        register_stored(layer, "weight_shape", shape, **attributes)
        if not self.weights.symmetric:
            rows = count_words(out_features, self.bits)
            zeros = torch.empty(rows, self.num_groups, dtype=torch.int32)
            register_stored(layer, "weight_zero_point", zeros)
        if self.weights.reordered:
            size = in_features // self.num_groups

            def orders(generator: torch.Generator) -> torch.Tensor:
                order = torch.randperm(in_features, generator=generator)
                return (order // size).to(torch.int32).repeat(num_parts)

            groups = torch.empty(num_parts * in_features, dtype=torch.int32)
            numbered = {"num_groups": self.num_groups, "sample": orders}
            register_stored(layer, "weight_g_idx", groups, per_part=True, **numbered)

    def quantized_weight(self, layer: nn.Module) -> torch.Tensor:
        """Return the quantized weight ``[O, I]`` int8."""
        return (self._unpack_weight(layer).short() - self.middle).to(torch.int8)

    def zero_points(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the zero points ``[O, G]`` int8, or None if the weight is symmetric."""
        if self.weights.symmetric:
            return None
        return (self._unpack_zero_points(layer).short() - self.middle).to(torch.int8)

    def groups(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the group of each input ``[I]`` int64, or None if groups are consecutive.

        Raises: CheckpointError: groups differ in size or between fused layers.
        """
        if not self.weights.reordered:
            return None
        by_part = layer.get_parameter("weight_g_idx").view(len(self.members.sizes), -1)
        # All -1 is the initial value: the exporter never assigned groups.
        if (by_part == -1).all():
            return None
        names = [self.members.tensor(member, "weight_g_idx") for member in self.members.sizes]
        size = self.in_features // self.num_groups
        for name, groups in zip(names, by_part, strict=True):
            check_groups(name, groups, self.num_groups)
            if not torch.equal(groups, by_part[0]):
                raise CheckpointError(
                    name,
                    f"differs from {names[0]}, but fused layers share one input and must have the "
                    "same groups",
                    "quantize these layers together, or with 'actorder' 'weight'",
                )
        first = by_part[0].long()
        ordered = torch.arange(self.in_features, device=first.device) // size
        return None if torch.equal(first, ordered) else first

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the op's constants, with weight and zero points in the kernel's layout.

        Raises: CheckpointError: a tensor holds values that no weight can be computed from.
        """
        self._check_shapes(layer)
        scales, order = self.check_scales(layer), self.order(layer)
        width = 4 if self.packs_nibbles else 8
        shift = (1 << width - 1) - self.middle
        # Move the midpoint of the stored width to the midpoint of the op's width.
        quantized = self._unpack_weight(layer) + shift
        if order is not None:
            quantized = quantized.index_select(1, order)
        zeros = None
        if not self.weights.symmetric:
            zeros = (self._unpack_zero_points(layer) + shift).contiguous()
            # The 4-bit op takes one zero point per byte, unlike the weight.
            zeros = zeros if self.packs_nibbles else to_kernel_layout(zeros, width)
        return {"weight": to_kernel_layout(quantized, width), "scale": scales, "zero_points": zeros}

    def _unpack_weight(self, layer: nn.Module) -> torch.Tensor:
        return unpack_bits(layer.get_parameter("weight_packed"), self.bits, self.in_features)

    def _unpack_zero_points(self, layer: nn.Module) -> torch.Tensor:
        # Zero points are packed along the outputs, the weight along the inputs.
        words = layer.get_parameter("weight_zero_point").T.contiguous()
        return unpack_bits(words, self.bits, sum(self.members.sizes.values())).T

    def _check_words(self, site: Site, in_features: int) -> None:
        # Widths in _FULL divide 32, so every release packs them the same way.
        if self.bits not in _FULL and in_features % _WORD:
            # Early releases pack these widths differently. If 32 divides the inputs, the number
            # of int32 words tells both layouts apart.
            raise ConfigError(
                f"{site.prefix}: {in_features} weights of {self.bits} bits a row can be packed in "
                f"two ways, unless they are a multiple of {_WORD}. Try: leave the layer plain"
            )
        if self.weights.symmetric or len(self.members.sizes) == 1:
            return
        for member, size in self.members.sizes.items():
            if size * self.bits % _WORD:
                raise ConfigError(
                    f"{site.prefix}: the zero points of {member}, {size} of {self.bits} bits, do "
                    f"not fill words of {_WORD} bits, and it is fused with others. "
                    "Try: quantize symmetrically, or leave the layer plain"
                )

    def _check_shapes(self, layer: nn.Module) -> None:
        shapes = layer.get_parameter("weight_shape").view(-1, 2).tolist()
        for (member, size), stored_shape in zip(self.members.sizes.items(), shapes, strict=True):
            if stored_shape != [size, self.in_features]:
                raise CheckpointError(
                    self.members.tensor(member, "weight_shape"),
                    f"holds {stored_shape}, the config asks for {[size, self.in_features]}",
                    "copy config.json and the weights of one checkpoint",
                )
