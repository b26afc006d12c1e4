"""Linear layers of integer weights of 1 to 8 bits in words, multiplied in the model's dtype.

Dimensions: I input features, O output features, G groups, P layers of the checkpoint that are
fused.
"""

from __future__ import annotations

import torch
from torch import nn

from interposer import Site
from interposer.errors import CheckpointError, ConfigError
from interposer_quantization._compressed_tensors.bits import number_of_words, unpack_bits
from interposer_quantization._compressed_tensors.int_linear import IntLinear
from interposer_quantization._compressed_tensors.stored import Inputs, Weights
from interposer_quantization._weights.input_groups import check_groups
from interposer_quantization._weights.int_packing import kernel_codes
from interposer_quantization._weights.packed_linear import register_stored

_WORD = 32
_FULL = (1, 2, 4, 8)


class PackedIntLinear(IntLinear):
    """``weight_packed`` ``[O, I * bits / 32]`` and ``weight_zero_point`` ``[O * bits / 32, G]``.

    Both int32, of codes to which half of their range was added. ``weight_shape`` repeats O and I;
    ``weight_g_idx`` ``[I]``, if there is one, names the group of each input.

    The words are repacked once, when the layer is finalized, for an op of 4 bits or one of 8: what
    is narrower is widened to these.
    """

    def __init__(self, weights: Weights, inputs: Inputs | None) -> None:
        super().__init__(weights, inputs)
        self.bits = weights.bits
        self.middle = 1 << self.bits - 1

    def register_codes(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int
    ) -> None:
        """Register words, the shape and, where they are stored, zero points and groups.

        Raises: ConfigError: words would belong to two layers, or could be read in two ways.
        """
        self._check_words(site, in_features)
        num_parts = len(self.members.sizes)
        words = torch.empty(
            out_features, number_of_words(in_features, self.bits), dtype=torch.int32
        )
        register_stored(layer, "weight_packed", words)
        sizes = [[size, in_features] for size in self.members.sizes.values()]

        def shapes(_: torch.Generator) -> torch.Tensor:
            return torch.tensor(sizes).flatten()

        shape = torch.empty(2 * num_parts, dtype=torch.int64)
        stated = {"per_part": True, "states_sizes": True, "sample": shapes}
        register_stored(layer, "weight_shape", shape, **stated)
        if not self.weights.symmetric:
            rows = number_of_words(out_features, self.bits)
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

    def codes(self, layer: nn.Module) -> torch.Tensor:
        """Return the codes ``[O, I]`` int8, signed."""
        return (self._unsigned(layer).short() - self.middle).to(torch.int8)

    def zero_points(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the zero points ``[O, G]`` int8, signed, or None where all are 0."""
        if self.weights.symmetric:
            return None
        return (self._unsigned_zeros(layer).short() - self.middle).to(torch.int8)

    def groups(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the group of each input ``[I]`` int64, None where groups follow each other.

        Raises: CheckpointError: groups are not of one size, or those of fused layers differ.
        """
        if not self.weights.reordered:
            return None
        by_part = layer.get_parameter("weight_g_idx").view(len(self.members.sizes), -1)
        # -1 throughout is what stands there before groups were chosen.
        if (by_part == -1).all():
            return None
        names = [self.members.tensor(member, "weight_g_idx") for member in self.members.sizes]
        size = self.in_features // self.num_groups
        for name, groups in zip(names, by_part, strict=True):
            check_groups(name, groups, self.num_groups)
            if not torch.equal(groups, by_part[0]):
                raise CheckpointError(
                    name,
                    f"differs from {names[0]}, but the two layers run as one product, whose input "
                    "has one order",
                    "quantize these layers together, or with 'actorder' 'weight'",
                )
        first = by_part[0].long()
        ordered = torch.arange(self.in_features, device=first.device) // size
        return None if torch.equal(first, ordered) else first

    def constants(self, layer: nn.Module) -> dict[str, torch.Tensor | None]:
        """Return the codes, repacked as the op takes them, and what belongs to them.

        Raises: CheckpointError: a tensor holds what no weight can be computed with.
        """
        self._check_shapes(layer)
        scales, order = self.check_scales(layer), self.order(layer)
        width = 4 if self.narrow else 8
        more = (1 << width - 1) - self.middle
        codes = self._unsigned(layer) + more
        if order is not None:
            codes = codes.index_select(1, order)
        zeros = None
        if not self.weights.symmetric:
            zeros = (self._unsigned_zeros(layer) + more).contiguous()
            # The op of 4 bits takes zero points one by one.
            zeros = zeros if self.narrow else kernel_codes(zeros, width)
        return {"weight": kernel_codes(codes, width), "scale": scales, "zero_points": zeros}

    def _unsigned(self, layer: nn.Module) -> torch.Tensor:
        return unpack_bits(layer.get_parameter("weight_packed"), self.bits, self.in_features)

    def _unsigned_zeros(self, layer: nn.Module) -> torch.Tensor:
        words = layer.get_parameter("weight_zero_point").T.contiguous()
        return unpack_bits(words, self.bits, sum(self.members.sizes.values())).T

    def _check_words(self, site: Site, in_features: int) -> None:
        if self.bits not in _FULL and in_features % _WORD:
            # Early releases pack these otherwise; with full runs of 32 the words tell.
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
        for (member, size), found in zip(self.members.sizes.items(), shapes, strict=True):
            if found != [size, self.in_features]:
                raise CheckpointError(
                    self.members.tensor(member, "weight_shape"),
                    f"holds {found}, the config asks for {[size, self.in_features]}",
                    "copy config.json and the weights of one checkpoint",
                )
