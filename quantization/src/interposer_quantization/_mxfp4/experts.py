"""Routed experts with MXFP4 weights, as gpt-oss stores them.

Dimensions: E experts, H hidden size, I intermediate size.

Source: the tensor layouts are those of the released gpt-oss checkpoints (arXiv:2508.10925), as
transformers 5.23 reads them (``integrations/mxfp4.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, Site
from interposer.errors import CheckpointError, ConfigError
from interposer_ops.experts import fused_experts_mxfp4
from interposer_ops.layers.moe.experts import gates_first
from interposer_ops.quantizers import MX_BLOCK_SIZE, decode_e2m1, decode_e8m0, unpack_nibbles
from interposer_quantization._weights.packed_linear import register_stored

# A scale is 2^(e - 127); 255 is the NaN code.
_NAN = 255
_PROJECTIONS = {"gate_up": "gate_up_proj", "down": "down_proj"}
_KINDS = {"": "_blocks", "_scale": "_scales", "_bias": "_bias"}


class Mxfp4Experts(ExpertsMethod):
    """Experts method for MXFP4 blocks: 32 inputs in 16 bytes, low nibble first, and their scales.

    ``gate_up_proj_blocks`` is ``[E, 2 I, H / 32, 16]``, ``gate_up_proj_scales`` is
    ``[E, 2 I, H / 32]`` and ``gate_up_proj_bias`` ``[E, 2 I]``. The ``down_proj`` tensors have H
    outputs and I inputs. ``finalize`` keeps the quantized values and only moves all gate rows
    before the up rows.
    """

    def create_weights(self, layer: nn.Module, site: Site, spec: ExpertsSpec) -> None:
        """Register blocks, scales and, if requested, biases of both projections.

        Raises: ConfigError: the block size does not divide the inputs of a projection.
        """
        self.prefix, self.spec = site.prefix, spec
        count, hidden, inner = spec.num_experts, spec.hidden_size, spec.intermediate_size
        for inputs in (hidden, inner):
            if inputs % MX_BLOCK_SIZE:
                raise ConfigError(
                    f"{site.prefix}: blocks of {MX_BLOCK_SIZE} do not divide its {inputs} inputs. "
                    "Try: leave the experts plain"
                )
        self.bound = site.bind_kernel(fused_experts_mxfp4, **spec.dims())
        shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        for name, (outputs, inputs) in shapes.items():
            groups = (count, outputs, inputs // MX_BLOCK_SIZE)
            blocks = torch.empty(*groups, MX_BLOCK_SIZE // 2, dtype=torch.uint8)
            register_stored(layer, f"{name}_blocks", blocks)
            scales = torch.empty(groups, dtype=torch.uint8)
            register_stored(layer, f"{name}_scales", scales, sample=_near_one(groups))
            offsets = torch.empty(count, outputs, dtype=site.dtype) if spec.biased else None
            register_stored(layer, f"{name}_bias", offsets)

    def dequantized(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the float64 matrices: quantized value * scale."""
        constants = self._ordered(layer)
        gate_up, down = (
            _dequantize(constants[name], constants[f"{name}_scale"]) for name in _PROJECTIONS
        )
        return gate_up, down

    def finalize(self, layer: nn.Module) -> tuple[Callable[..., torch.Tensor], tuple[Any, ...]]:
        """Return the bound kernel and constants, and free the stored parameters.

        Raises: CheckpointError: a scale is the NaN code.
        """
        for name in _PROJECTIONS.values():
            self._check_scales(layer, f"{name}_scales")
        constants = self._ordered(layer)
        for name, _ in _names():
            layer.register_parameter(name, None)
        prepared = self.bound.prepared(**constants)
        return self.bound.function, tuple(prepared[name] for name in constants)

    def _ordered(self, layer: nn.Module) -> dict[str, Any]:
        """Return the tensors by the op's argument names, in the op's order."""
        constants: dict[str, Any] = {}
        for stored, name in _names():
            parameter = layer._parameters[stored]
            tensor = None if parameter is None else parameter.data
            if tensor is not None and stored.endswith("_blocks"):
                # [E, outputs, blocks, 16] becomes [E, outputs, inputs / 2].
                tensor = tensor.flatten(2)
            if tensor is not None and name.startswith("gate_up") and self.spec.alternating:
                # gpt-oss interleaves gate and up rows.
                tensor = gates_first(tensor)
            constants[name] = tensor
        return constants

    def _check_scales(self, layer: nn.Module, name: str) -> None:
        scales = layer.get_parameter(name)
        is_nan = scales == _NAN
        if is_nan.any():
            position = [int(i) for i in is_nan.nonzero()[0]]
            raise CheckpointError(
                f"{self.prefix}.{name}",
                f"{int(is_nan.sum())} of {scales.numel()} scales are {_NAN}, which is not a "
                f"number, the first at {position}",
                "copy the checkpoint again, or quantize the model again",
            )


def _names() -> Iterator[tuple[str, str]]:
    """Yield the parameter name and the op's name of each constant, in the op's order."""
    for constant, projection in _PROJECTIONS.items():
        for kind, stored in _KINDS.items():
            yield f"{projection}{stored}", f"{constant}{kind}"


def _dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize MXFP4 blocks to ``[E, outputs, inputs]`` float64."""
    values = decode_e2m1(unpack_nibbles(packed), torch.float64)
    blocks = values.unflatten(-1, (scales.shape[-1], MX_BLOCK_SIZE))
    scaled: torch.Tensor = blocks * decode_e8m0(scales, torch.float64)[..., None]
    return scaled.flatten(-2)


def _near_one(shape: tuple[int, ...]) -> Callable[[torch.Generator], torch.Tensor]:
    """Return a sampler of scales from 2^-8 to 2^-4."""

    def sample(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(119, 124, shape, dtype=torch.uint8, generator=generator)

    return sample
