"""Quantization methods of vLLM's layers that ask a chosen kernel for the product.

The method of a layer is replaced by one of a subclass of its own class, so that whatever asks what
kind of method a layer has finds what it looks for.
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
from interposer_vllm._adoption import Adoption, Product, product_of
from interposer_vllm._session import session

__all__ = ["AdoptedLinear", "adopt", "adopt_product", "checkpoint_settings", "keep", "with_method"]


# vLLM writes these into the checkpoint's quantization_config, for cutting the scales of a cache.
_FACTS_OF_VLLM = {"total_num_heads", "total_num_kv_heads"}


def adopt(layer: Any) -> None:
    """Let a linear layer of vLLM, which is built and not loaded, use what is chosen here.

    Raises: NoCandidateError, UnknownNameError: the user pinned or required what cannot be had.
    """
    adopt_product(layer, lambda: product_of(layer, _fused_names(layer)), AdoptedLinear)


def adopt_product(layer: Any, product: Callable[[], Product], mixin: type) -> None:
    """Let ``mixin``, part of a method, multiply in ``layer`` by what is chosen here.

    A layer that cannot stays vLLM's own, with the reason in the report.

    Args:
        product: returns that of the layer, or raises why it is vLLM's own.
        mixin: ``AdoptedLinear`` or a subclass, which gets ``adoption``.
    Raises: NoCandidateError, UnknownNameError: the user pinned or required what cannot be had.
    """
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    settings = None
    if not isinstance(layer.quant_method, UnquantizedLinearMethod):
        settings = checkpoint_settings()
        if settings is None:
            keep(layer.prefix, "vLLM quantizes it while it loads")
            return
    try:
        adoption = Adoption(session(), layer, settings, product())
    except InterposerError as error:
        keep(layer.prefix, error)
        return
    with_method(layer, mixin, adoption=adoption)


def with_method(layer: Any, mixin: type, **attributes: object) -> None:
    """Replace the method of ``layer`` by one of its own class with ``mixin`` before it."""
    own = layer.quant_method
    of: Any = type(own)
    kind: Any = _class(mixin, of)
    replaced = kind.__new__(kind)
    vars(replaced).update(vars(own), own=own, **attributes)
    layer.quant_method = replaced


_classes: dict[tuple[type, type], type] = {}


def _class(mixin: type, own: type) -> type:
    if (mixin, own) not in _classes:
        # Under the same name: vLLM looks some of its methods up by it.
        _classes[mixin, own] = type(own.__name__, (mixin, own), {"__module__": __name__})
    return _classes[mixin, own]


class AdoptedLinear:
    """Part of a method that asks ``adoption`` for the product, and ``own`` where it fails."""

    adoption: Adoption
    own: Any
    # What was prepared by another process is in the form of vLLM's own kernels.
    supports_pre_processed_weights = False

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Prepare the weights for the chosen kernel; those of a form unknown stay vLLM's own."""
        prefix: str = layer.prefix  # type: ignore[assignment]
        try:
            self.adoption.finalize(layer)
        except InterposerError as error:
            keep(prefix, error)
            layer.quant_method = self.own
            self.own.process_weights_after_loading(layer)
            return
        session().taken.append(prefix)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of ``x``."""
        return self.adoption(x, bias)


def keep(prefix: str, why: InterposerError | str) -> None:
    """Write down why a layer stays vLLM's own.

    Raises: NoCandidateError, UnknownNameError: the user asked for what cannot be had, by a pin, a
        requirement or a name.
    """
    if isinstance(why, NoCandidateError | UnknownNameError) and not isinstance(
        why, PlatformUnavailableError
    ):
        raise why
    # Where there is no session, whoever opened it has said so, for all layers.
    with suppress(InterposerError):
        session().kept[prefix] = str(why)


def checkpoint_settings() -> Mapping[str, Any] | None:
    """Return the ``quantization_config`` of the model that is being built, None without one."""
    from vllm.config import get_current_vllm_config

    model = get_current_vllm_config().model_config
    if model is None:
        # A layer is built by itself.
        return None
    config = model.hf_config
    for name in ("quantization_config", "compression_config"):
        found = getattr(config, name, None) or getattr(config.get_text_config(), name, None)
        if found is not None:
            settings = found if isinstance(found, Mapping) else found.to_dict()
            return {key: value for key, value in settings.items() if key not in _FACTS_OF_VLLM}
    return None


def _fused_names(layer: Any) -> Mapping[str, list[str]]:
    """Return the names of the checkpoint's layers that are fused, by the last part of a prefix."""
    return getattr(layer.quant_config, "packed_modules_mapping", None) or {}
