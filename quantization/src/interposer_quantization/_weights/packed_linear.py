"""Linear layers whose weights are unsigned codes in words of 32 bits, as GPTQ and AWQ store them.

Dimensions: I input features, O output features, G groups, P layers that are fused.
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
from interposer_quantization._compressed_tensors.parameters import number_of_groups
from interposer_quantization._weights.int_packing import kernel_codes
from interposer_quantization._weights.weight_only import bind_weight_only, product_of_sorted

_STORED = ("qweight", "qzeros", "scales", "g_idx")


class PackedLinear(LinearMethod):
    """``scales`` ``[G, O]``, and ``qweight`` and ``qzeros`` as the format packs their codes.

    A weight is (code - zero point) * scale, the two of its group. The words are repacked once,
    when the layer is finalized, and nothing of what was stored is held besides. Scales are held in
    float32, which represents those of every checkpoint exactly, whatever the model's dtype.

    Args:
        bits: of a code, 4 or 8.
        group_size: inputs that share a scale; None means all of them.
        symmetric: every zero point is the middle code, so kernels need not read it.
    Attributes:
        middles: what zero points may be read as where they are the middle code.
    """

    def __init__(self, bits: int, group_size: int | None, symmetric: bool) -> None:
        self.bits = bits
        self.group_size = group_size
        self.symmetric = symmetric
        self.codes_per_word = 32 // bits
        self.middle = 1 << bits - 1
        self.middles: tuple[int, ...] = (self.middle,)

    @abstractmethod
    def weight_words(self, in_features: int, out_features: int) -> tuple[int, int, int]:
        """Return the shape of ``qweight`` and the dimension along which outputs lie."""

    @abstractmethod
    def weight_codes(self, qweight: torch.Tensor) -> torch.Tensor:
        """Return the codes ``[O, I]`` uint8."""

    @abstractmethod
    def zero_codes(self, qzeros: torch.Tensor) -> torch.Tensor:
        """Return the zero points ``[G, O]`` uint8."""

    @abstractmethod
    def zero_words(self, zero_points: torch.Tensor) -> torch.Tensor:
        """Return ``qzeros`` that holds these zero points."""

    def groups(self, layer: nn.Module) -> torch.Tensor | None:
        """Return the group of each input ``[I]`` int64, or None where groups follow each other.

        Raises: CheckpointError: the tensor that says so does not make sense.
        """
        return None

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register ``qweight``, ``qzeros``, ``scales`` and, if asked for, ``bias``.

        Raises: ConfigError: groups or words do not divide the layer.
        """
        self.prefix = site.prefix
        self.parts: Mapping[str, int] = getattr(layer, "parts", None) or {
            site.prefix.rpartition(".")[2]: out_features
        }
        size = self.group_size or in_features
        self.num_groups = num_groups = number_of_groups(site, in_features, size)
        self._check_words(in_features)
        self.bound = bind_weight_only(
            site, self.bits, in_features, out_features, size, not self.symmetric, biased=bias
        )
        *shape, dim = self.weight_words(in_features, out_features)
        register_stored(layer, "qweight", torch.empty(shape, dtype=torch.int32), shard_dim=dim)
        zeros = torch.empty(num_groups, out_features // self.codes_per_word, dtype=torch.int32)
        # Any number may stand for the zero points, unless all of them are known.
        known = {"sample": self._middle_words(zeros.shape)} if self.symmetric else {}
        register_stored(layer, "qzeros", zeros, shard_dim=1, **known)
        scales = torch.empty(num_groups, out_features, dtype=torch.float32)
        register_stored(layer, "scales", scales, shard_dim=1)
        offset = torch.empty(out_features, dtype=site.dtype) if bias else None
        register_stored(layer, "bias", offset)

    def dequantized(self, layer: nn.Module) -> torch.Tensor:
        """Return the float64 weight ``[O, I]``: each code less its zero point, times its scale."""
        codes = self.weight_codes(layer.get_parameter("qweight")).double()
        zeros = self.zero_codes(layer.get_parameter("qzeros")).double()
        if self.symmetric:
            zeros.fill_(self.middle)
        scales = layer.get_parameter("scales").double()
        groups = self.groups(layer)
        if groups is None:
            size = codes.shape[1] // len(scales)
            groups = torch.arange(codes.shape[1], device=codes.device) // size
        return (codes - zeros[groups].T) * scales[groups].T

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the bound kernel with its constants, after the one repacking of the weights.

        Where groups do not follow each other, the inputs of the weight are sorted by group, and
        those of ``x`` on every call.

        Raises: CheckpointError: a tensor holds what no weight can be computed with.
        """
        scales = layer.get_parameter("scales")
        self._check_scales(scales)
        zeros = self.zero_codes(layer.get_parameter("qzeros"))
        if self.symmetric:
            self._check_symmetric(zeros)
        groups = self.groups(layer)
        codes = self.weight_codes(layer.get_parameter("qweight"))
        order = None if groups is None else groups.argsort(stable=True)
        if order is not None:
            codes = codes.index_select(1, order)
        bias = layer._parameters["bias"]
        constants = {
            "weight": kernel_codes(codes, self.bits),
            "scale": scales.T.contiguous(),
            "bias": bias,
            "zero_points": None if self.symmetric else self._kernel_zeros(zeros),
        }
        # What was stored goes before a kernel prepares its own: three copies would not be needed.
        del codes, scales, zeros
        for name in _STORED:
            if name in layer._parameters:
                layer.register_parameter(name, None)
        prepared = self.bound.prepared(**constants)
        if prepared["bias"] is not bias:
            layer.register_parameter("bias", None)
        operands = tuple(prepared[name] for name in constants)
        if order is None:
            return self.bound.function, operands
        return partial(product_of_sorted, self.bound.function), (order, *operands)

    def tensor_names(self, name: str) -> list[str]:
        """Return the checkpoint's names of such a tensor, one for each layer that is fused."""
        parent = self.prefix.rpartition(".")[0]
        return [f"{parent}.{part}.{name}" if parent else f"{part}.{name}" for part in self.parts]

    def tensor_name(self, name: str, output: int) -> str:
        """Return the checkpoint's name of the tensor that holds an output of the layer."""
        stops = list(accumulate(self.parts.values()))
        return self.tensor_names(name)[bisect_right(stops, output)]

    def _check_words(self, in_features: int) -> None:
        """Raise ConfigError unless words are full: zero points lie in words along outputs."""
        for part, size in self.parts.items():
            words = self.weight_words(in_features, size)[:2]
            held = words[0] * words[1] * self.codes_per_word
            if size % self.codes_per_word or held != in_features * size:
                raise ConfigError(
                    f"{self.prefix}: {part} has {in_features} inputs and {size} outputs, which do "
                    f"not fill words of {self.codes_per_word} codes. Try: leave the layer plain"
                )

    def _middle_words(self, shape: torch.Size) -> Callable[[torch.Generator], torch.Tensor]:
        """Return a function of a generator that returns words of middle zero points."""
        rows, codes = shape[0], shape[1] * self.codes_per_word

        def sample(_: torch.Generator) -> torch.Tensor:
            return self.zero_words(torch.full((rows, codes), self.middle, dtype=torch.uint8))

        return sample

    def _kernel_zeros(self, zeros: torch.Tensor) -> torch.Tensor:
        """Return the zero points ``[O, G]`` as the op takes them: of 8 bits less 128."""
        turned = zeros.T.contiguous()
        return turned if self.bits == 4 else kernel_codes(turned, self.bits)

    def _check_scales(self, scales: torch.Tensor) -> None:
        bad = ~scales.isfinite() | (scales == 0)
        if bad.any():
            group, output = (int(index) for index in bad.nonzero()[0])
            raise CheckpointError(
                self.tensor_name("scales", output),
                f"holds {int(bad.sum())} scales of the layer that are zero, infinite or not a "
                f"number, the first one {float(scales[group, output])} for group {group}",
                "copy the checkpoint again, or quantize again with scales in a wider dtype",
            )

    def _check_symmetric(self, zeros: torch.Tensor) -> None:
        if not any((zeros == middle).all() for middle in self.middles):
            other = zeros != self.middle
            group, output = (int(index) for index in other.nonzero()[0])
            raise CheckpointError(
                self.tensor_name("qzeros", output),
                f"holds the zero point {int(zeros[group, output])} for group {group}, but all are "
                f"{self.middle} where quantization_config says that weights are symmetric",
                "correct the quantization_config if the zero points are right",
            )


def register_stored(
    layer: nn.Module, name: str, tensor: torch.Tensor | None, **attributes: object
) -> None:
    """Register a parameter that a checkpoint stores, with attributes such as ``shard_dim``."""
    parameter = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
    if parameter is not None:
        parameter.__dict__.update(attributes)
    layer.register_parameter(name, parameter)
