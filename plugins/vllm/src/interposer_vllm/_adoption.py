"""Layers of vLLM whose weights are held, and multiplied by, in the form of a chosen kernel.

Dimensions: I input features, O output features.
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
from interposer_vllm._graph_ops import PlacedKernel
from interposer_vllm._session import Session
from interposer_vllm._stored_weights import empty_layer, fill, narrow, parts_of, widen

__all__ = ["Adoption", "Product", "emptied", "product_of"]


@dataclass(frozen=True, slots=True)
class Product:
    """One product of vLLM, as this worker holds its weight.

    Attributes:
        parts: outputs of the checkpoint's layers that are fused in it, by name.
        in_features: of the input that they share.
        biased: the kernel adds the layer's bias.
    """

    parts: Mapping[str, int]
    in_features: int
    biased: bool

    @property
    def out_features(self) -> int:
        """Outputs of all parts together."""
        return sum(self.parts.values())


def product_of(layer: Any, fused: Mapping[str, list[str]]) -> Product:
    """Return the product of a linear layer of vLLM.

    Args:
        fused: names of the checkpoint's layers by the last part of a prefix.
    Raises: ConfigError: nothing else may hold its weight.
    """
    if getattr(layer, "_cpu_skip_gemm_dispatch", False):
        raise ConfigError("vLLM reads its weight itself")
    sizes = list(getattr(layer, "output_partition_sizes", [layer.output_size]))
    in_features = int(getattr(layer, "input_size_per_partition", layer.input_size))
    return Product(parts_of(layer.prefix, sizes, fused), in_features, _adds_bias(layer))


class Adoption:
    """One product: the method here that holds its weights, and the bound kernel.

    Attributes:
        biased: the kernel adds the layer's bias.

    Args:
        layer: of vLLM, built and not loaded.
        settings: the checkpoint's ``quantization_config``; None where the layer is plain.
    Raises: InterposerError: no method here takes the layer, or no kernel.
    """

    def __init__(
        self, session: Session, layer: Any, settings: Mapping[str, Any] | None, product: Product
    ) -> None:
        self.placed = PlacedKernel()
        self._session, self._prefix = session, layer.prefix
        self.biased = product.biased
        self.out_features = product.out_features
        self._method = _method(session, layer.prefix, product.parts, settings)
        self._created = empty_layer(product.parts)
        site = session.site(layer.prefix, layer.params_dtype)
        # vLLM allocates what is loaded; here is only said in which form it is wanted.
        with torch.device("meta"):
            self._method.create_weights(
                self._created, site, product.in_features, product.out_features, product.biased
            )
        self._widened = widen(layer, self._created)

    def finalize(self, layer: Any) -> None:
        """Hand the loaded weights to the method, and free those that the operands replace.

        vLLM calls it again where it loads other weights into a layer.

        Raises: InterposerError: they are of another form, or hold what no weight can be computed
            with; the layer is as it was.
        """
        holder = copy.copy(self._created)
        holder._parameters = dict(self._created._parameters)
        loaded = dict(layer._parameters)
        if not self.biased:
            loaded.pop("bias", None)
        try:
            fill(holder, loaded)
            kernel, operands = self._method.finalize(holder)
        except InterposerError:
            narrow(layer, self._widened)
            raise
        self.placed.bind(kernel, operands, self._session.is_traceable(self._prefix))
        emptied(layer, operands, keep=("bias",))

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product of ``x`` ``[..., I]``, ``[..., O]``, plus ``bias`` if there is one."""
        product = self.placed.multiply(x, self.out_features)
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
