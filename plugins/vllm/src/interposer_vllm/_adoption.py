"""Linear layers of vLLM with weights in a selected kernel's layout.

Shapes: I input features, O output features of this worker's shard.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interposer import LinearMethod
from interposer.errors import ConfigError, InterposerError, UnknownNameError
from interposer_ops.layers.linear import PlainLinear
from interposer_vllm._graph_ops import SlotKernel
from interposer_vllm._session import Session
from interposer_vllm._stored_weights import empty_layer, fill, narrow, outputs_by_layer, widen

__all__ = ["Adoption", "LinearShape", "free_parameters", "linear_shape"]


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The sizes of one linear layer of vLLM, on this worker.

    Attributes:
        parts: output features of the fused checkpoint layers, by name.
        in_features: input features, shared by all parts.
        biased: the kernel adds the layer's bias.
    """

    parts: Mapping[str, int]
    in_features: int
    biased: bool

    @property
    def out_features(self) -> int:
        """Output features of all parts together."""
        return sum(self.parts.values())


def linear_shape(layer: Any, fused: Mapping[str, list[str]]) -> LinearShape:
    """Return the sizes of a linear layer of vLLM.

    Args:
        fused: names of the checkpoint's layers, by the last part of a fused layer's prefix.
    Raises: ConfigError: vLLM reads the layer's weight outside of the layer's method.
    """
    if getattr(layer, "_cpu_skip_gemm_dispatch", False):
        raise ConfigError("vLLM reads its weight outside of its method")
    sizes = list(getattr(layer, "output_partition_sizes", [layer.output_size]))
    in_features = int(getattr(layer, "input_size_per_partition", layer.input_size))
    return LinearShape(outputs_by_layer(layer.prefix, sizes, fused), in_features, _adds_bias(layer))


class Adoption:
    """A linear layer of vLLM whose weights and matmul come from interposer's kernels.

    Attributes:
        kernel: the bound kernel.
        biased: the kernel adds the layer's bias.
        out_features: of this worker's shard.

    Args:
        layer: a layer of vLLM that is built but not loaded.
        settings: the checkpoint's ``quantization_config``; None if the layer is not quantized.
        shape: the sizes of the layer.
    Raises: InterposerError: no linear method or no kernel accepts the layer.
    """

    def __init__(
        self, session: Session, layer: Any, settings: Mapping[str, Any] | None, shape: LinearShape
    ) -> None:
        self.kernel = SlotKernel()
        self._session, self._prefix = session, layer.prefix
        self.biased = shape.biased
        self.out_features = shape.out_features
        self._method = _linear_method(session, layer.prefix, shape.parts, settings)
        self._created = empty_layer(shape.parts)
        site = session.site(layer.prefix, layer.params_dtype)
        # These parameters state shapes and dtypes only: vLLM allocates and loads the weights.
        with torch.device("meta"):
            self._method.create_weights(
                self._created, site, shape.in_features, shape.out_features, shape.biased
            )
        # Before vLLM loads the weights, so that scales are not rounded to the model's dtype.
        self._widened = widen(layer, self._created)

    def finalize(self, layer: Any) -> None:
        """Prepare the loaded weights for the kernel, and free the unused weights.

        vLLM calls this method again after loading other weights into the layer.

        Raises: InterposerError: the weights have another layout than the method expects, or invalid
            values. The layer is unchanged then.
        """
        # A copy, because vLLM may load other weights later and call this method again.
        holder = copy.copy(self._created)
        holder._parameters = dict(self._created._parameters)
        loaded = dict(layer._parameters)
        if not self.biased:
            loaded.pop("bias", None)
        try:
            fill(holder, loaded)
            function, operands = self._method.finalize(holder)
        except InterposerError:
            narrow(layer, self._widened)
            raise
        self.kernel.bind(function, operands, self._session.is_traceable(self._prefix))
        free_parameters(layer, operands, keep=("bias",))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply ``x`` ``[..., I]`` by the weight, ``[..., O]``, and add the bias, if any."""
        output = self.kernel.multiply(x, self.out_features)
        return output if bias is None or self.biased else output + bias


def _linear_method(
    session: Session, prefix: str, parts: Mapping[str, int], settings: Mapping[str, Any] | None
) -> LinearMethod:
    if settings is None:
        return PlainLinear()
    try:
        scheme = session.scheme(settings)
    except UnknownNameError as error:
        # The checkpoint named the scheme, not the user: the layer stays vLLM's own, no error.
        raise ConfigError(str(error)) from error
    method = scheme.linear_method(prefix, tuple(parts))
    if method is None:
        raise ConfigError("is quantized in vLLM, but not by quantization_config")
    return method


def _adds_bias(layer: Any) -> bool:
    """Return whether this worker adds the bias, which only one tensor-parallel worker does."""
    if getattr(layer, "bias", None) is None or getattr(layer, "skip_bias_add", False):
        return False
    return not (hasattr(layer, "input_is_parallel") and layer.tp_rank > 0)


def free_parameters(layer: nn.Module, operands: Iterable[Any], keep: Iterable[str] = ()) -> None:
    """Replace ``layer``'s parameters by empty tensors, except those that the kernel still reads.

    The empty tensors stay registered because vLLM reads the device and dtype of parameters.
    """
    # Tensors of opaque layouts, such as MKL-DNN's, are copies and have no storage to compare.
    strided_operands = [t for t in operands if isinstance(t, Tensor) and t.layout == torch.strided]
    storage_pointers = {t.untyped_storage().data_ptr() for t in strided_operands}
    for name, parameter in list(layer._parameters.items()):
        if parameter is None or name in keep or not parameter.numel():
            continue
        if parameter.untyped_storage().data_ptr() not in storage_pointers:
            empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            layer.register_parameter(name, nn.Parameter(empty, requires_grad=False))
