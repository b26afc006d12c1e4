"""Quantization methods that compute vLLM's layers by selected kernels.

The new method of a layer is an instance of a subclass of the old method's class, so that vLLM's
checks for kinds of methods still succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from interposer.errors import (
    InterposerError,
    NoCandidateError,
    PlatformUnavailableError,
    UnknownNameError,
)
from interposer_vllm._adoption import Adoption, LinearShape, linear_shape
from interposer_vllm._session import session

__all__ = [
    "AdoptedLinear",
    "adopt_linear",
    "adopt_matmul",
    "checkpoint_settings",
    "keep_in_vllm",
    "with_method",
]


# vLLM adds these to the checkpoint's quantization_config, to shard the scales of a KV cache.
_FACTS_OF_VLLM = {"total_num_heads", "total_num_kv_heads"}


def adopt_linear(layer: Any) -> None:
    """Let a selected kernel compute a linear layer of vLLM that is built but not loaded.

    Raises: NoCandidateError, UnknownNameError: the user pinned or required a kernel that cannot be
        used.
    """
    adopt_matmul(layer, lambda: linear_shape(layer, _fused_names(layer)), AdoptedLinear)


def adopt_matmul(layer: Any, shape: Callable[[], LinearShape], mixin: type) -> None:
    """Replace the quantization method of ``layer`` by ``mixin``, which uses a selected kernel.

    A layer that interposer cannot compute keeps vLLM's method, with the reason in the report.

    Args:
        shape: returns the sizes of the layer, or raises the reason why the layer stays vLLM's own.
        mixin: ``AdoptedLinear`` or a subclass, which gets the attribute ``adoption``.
    Raises: NoCandidateError, UnknownNameError: the user pinned or required a kernel that cannot be
        used.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    settings = None
    if not isinstance(layer.quant_method, UnquantizedLinearMethod):
        settings = checkpoint_settings()
        if settings is None:
            keep_in_vllm(layer.prefix, "vLLM quantizes it while it loads")
            return
    try:
        adoption = Adoption(session(), layer, settings, shape())
    except InterposerError as error:
        keep_in_vllm(layer.prefix, error)
        return
    with_method(layer, mixin, adoption=adoption)


def with_method(layer: Any, mixin: type, **attributes: object) -> None:
    """Replace the quantization method of ``layer`` by an instance of a subclass with ``mixin``."""
    vllm_method = layer.quant_method
    vllm_class: Any = type(vllm_method)
    subclass: Any = _subclass(mixin, vllm_class)
    # The constructor of vLLM's class takes arguments that are unknown here, so its state is copied.
    method = subclass.__new__(subclass)
    vars(method).update(vars(vllm_method), vllm_method=vllm_method, **attributes)
    layer.quant_method = method


_subclasses: dict[tuple[type, type], type] = {}


def _subclass(mixin: type, vllm_class: type) -> type:
    if (mixin, vllm_class) not in _subclasses:
        # vLLM looks some of its methods up by the name of their class.
        _subclasses[mixin, vllm_class] = type(
            vllm_class.__name__, (mixin, vllm_class), {"__module__": __name__}
        )
    return _subclasses[mixin, vllm_class]


class AdoptedLinear:
    """Mixin of a quantization method that multiplies by ``adoption``, or by vLLM if that fails."""

    adoption: Adoption
    vllm_method: Any
    # Weights that another process has prepared are in the layout of vLLM's kernels.
    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Prepare the weights for the selected kernel, or let vLLM do so if the kernel cannot."""
        prefix: str = layer.prefix  # type: ignore[assignment]
        try:
            self.adoption.finalize(layer)
        except InterposerError as error:
            keep_in_vllm(prefix, error)
            layer.quant_method = self.vllm_method
            self.vllm_method.process_weights_after_loading(layer)
            return
        session().taken.append(prefix)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply ``x`` by the layer's weight, and add ``bias`` if there is one."""
        return self.adoption(x, bias)


def keep_in_vllm(prefix: str, reason: InterposerError | str) -> None:
    """Record why a layer keeps running on vLLM's kernels.

    Raises: NoCandidateError, UnknownNameError: ``reason`` itself, if the user caused it by a pin, a
        requirement or a name.
    """
    if isinstance(reason, NoCandidateError | UnknownNameError) and not isinstance(
        reason, PlatformUnavailableError
    ):
        raise reason
    # Without a session there is no report: the failed attempt to open one was logged.
    with suppress(InterposerError):
        session().kept[prefix] = str(reason)


def checkpoint_settings() -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of the model that vLLM is building, or None."""
    from vllm.config import get_current_vllm_config

    model = get_current_vllm_config().model_config
    if model is None:
        # A test or a host builds a single layer.
        return None
    config = model.hf_config
    for name in ("quantization_config", "compression_config"):
        stored = getattr(config, name, None) or getattr(config.get_text_config(), name, None)
        if stored is not None:
            settings = stored if isinstance(stored, Mapping) else stored.to_dict()
            return {key: value for key, value in settings.items() if key not in _FACTS_OF_VLLM}
    return None


def _fused_names(layer: Any) -> Mapping[str, list[str]]:
    """Return the names of fused checkpoint layers, by the last part of the fused layer's prefix."""
    return getattr(layer.quant_config, "packed_modules_mapping", None) or {}
