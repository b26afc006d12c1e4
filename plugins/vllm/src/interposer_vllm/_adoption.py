"""Layers of vLLM whose weights are held, and multiplied by, in the form of a chosen kernel.

Dimensions: I input features, O output features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from interposer import LinearMethod
from interposer.errors import ConfigError, UnknownNameError
from interposer_ops.layers.linear import PlainLinear
from interposer_vllm._graph_ops import multiply, new_place, place_call
from interposer_vllm._session import Session
from interposer_vllm._stored_weights import empty_layer, fill, parts_of

__all__ = ["Adoption", "emptied"]


class Adoption:
    """One linear layer: the method here that holds its weights, and the bound kernel.

    Attributes:
        biased: the kernel adds the layer's bias.

    Args:
        layer: of vLLM, built and not loaded.
        settings: the checkpoint's ``quantization_config``; None where the layer is plain.
        fused: names of the checkpoint's layers by the last part of a prefix.
    Raises: InterposerError: no method here takes the layer, or no kernel.
    """

    def __init__(
        self,
        session: Session,
        layer: Any,
        settings: Mapping[str, Any] | None,
        fused: Mapping[str, list[str]],
    ) -> None:
        if getattr(layer, "_cpu_skip_gemm_dispatch", False):
            raise ConfigError("vLLM reads its weight itself")
        self.place = new_place()
        self.biased = _adds_bias(layer)
        sizes = list(getattr(layer, "output_partition_sizes", [layer.output_size]))
        self.out_features = sum(sizes)
        in_features = int(getattr(layer, "input_size_per_partition", layer.input_size))
        parts = parts_of(layer.prefix, sizes, fused)
        self._method = _method(session, layer.prefix, parts, settings)
        self._created = empty_layer(parts)
        site = session.site(layer.prefix, layer.params_dtype)
        # vLLM allocates what is loaded; here is only said in which form it is wanted.
        with torch.device("meta"):
            self._method.create_weights(
                self._created, site, in_features, self.out_features, self.biased
            )
        self.kernel: Callable[..., Tensor] | None = None
        self.operands: tuple[Any, ...] = ()

    def finalize(self, layer: Any) -> None:
        """Hand the loaded weights to the method, and free those that the operands replace.

        vLLM calls it again where it loads other weights into a layer.

        Raises: InterposerError: they are of another form, or hold what no weight can be computed
            with; the layer is as it was.
        """
        holder = copy.copy(self._created)
        holder._parameters = dict(self._created._parameters)
        fill(holder, {n: p for n, p in layer._parameters.items() if n != "bias" or self.biased})
        self.kernel, self.operands = self._method.finalize(holder)
        place_call(self.place, self.kernel, self.operands)
        emptied(layer, self.operands, keep=("bias",))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of ``x`` ``[..., I]``, ``[..., O]``, plus ``bias`` if there is one."""
        if torch.compiler.is_compiling():
            product = multiply(x, self.place, self.out_features)
        else:
            product = self.kernel(x, *self.operands)  # type: ignore[misc]
        return product if bias is None or self.biased else product + bias


def _method(
    session: Session, prefix: str, parts: Mapping[str, int], settings: Mapping[str, Any] | None
) -> LinearMethod:
    if settings is None:
        return PlainLinear()
    try:
        scheme = session.scheme(settings)
    except UnknownNameError as error:
        # Not what the user asked for by name: the checkpoint did.
        raise ConfigError(str(error)) from error
    method = scheme.linear_method(prefix, tuple(parts))
    if method is None:
        raise ConfigError("is quantized in vLLM, and plain by quantization_config")
    return method


def _adds_bias(layer: Any) -> bool:
    """Say whether vLLM hands the layer's bias to its method: one worker of several adds it."""
    if getattr(layer, "bias", None) is None or getattr(layer, "skip_bias_add", False):
        return False
    return not (hasattr(layer, "input_is_parallel") and layer.tp_rank > 0)


def emptied(layer: nn.Module, operands: Iterable[Any], keep: Iterable[str] = ()) -> None:
    """Leave no memory in the parameters of ``layer``, but for those that operands are views of.

    They stay as empty tensors, of which vLLM asks the device and the dtype.
    """
    # Packed layouts are copies, without a storage that could be asked for.
    tensors = [t for t in operands if isinstance(t, Tensor) and t.layout == torch.strided]
    held = {t.untyped_storage().data_ptr() for t in tensors}
    for name, parameter in list(layer._parameters.items()):
        if parameter is None or name in keep or not parameter.numel():
            continue
        if parameter.untyped_storage().data_ptr() not in held:
            empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            layer.register_parameter(name, nn.Parameter(empty, requires_grad=False))
