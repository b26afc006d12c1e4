"""Mixtures of vLLM whose experts are held, and computed, in the form of a chosen kernel.

vLLM's router chooses the experts of each token, and its runner adds those that are shared.

Dimensions: T tokens, H hidden size, K chosen experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from interposer import Site
from interposer.errors import ConfigError, InterposerError, UnknownNameError
from interposer_ops.layers.experts import Experts
from interposer_vllm._adoption import emptied
from interposer_vllm._expert_weights import fill_experts, finalized
from interposer_vllm._experts_request import spec_of
from interposer_vllm._graph_ops import mix, new_place, place_call
from interposer_vllm._methods import checkpoint_settings, keep, with_method
from interposer_vllm._session import Session, session

__all__ = ["ExpertsAdoption", "adopt_experts"]


class ExpertsAdoption:
    """The routed experts of one layer: the layer here that holds and computes them.

    Args:
        layer: a ``RoutedExperts`` of vLLM, built and not loaded.
    Raises: InterposerError: no op or method here takes the layer, or no kernel.
    """

    def __init__(self, session: Session, layer: Any) -> None:
        device = session.placement.device.torch_device
        if torch.device(device).type != "cpu":
            raise ConfigError(f"experts on {device!r} are not taken over")
        self.place = new_place()
        self._spec = spec_of(layer)
        self._site: Site = session.site(layer.layer_name, layer.params_dtype)
        self.experts = self._built()

    def finalize(self, layer: Any) -> None:
        """Let the loaded weights be prepared, and free those that are replaced.

        vLLM calls it again where it loads other weights into a layer.

        Raises: InterposerError: they are of another form, or hold what no weight can be computed
            with; the layer is as it was.
        """
        experts = self._built() if self.experts.kernel else self.experts
        fill_experts(experts, _loaded(layer, self._spec.biased))
        operands = finalized(experts)
        self.experts = experts
        place_call(self.place, experts.forward, ())
        emptied(layer, operands)

    def __call__(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, own_ids: Tensor | None
    ) -> Tensor:
        """Return what the chosen experts make of ``x`` ``[T, H]``, added up by ``weights``.

        Args:
            weights: ``[T, K]``, any float dtype.
            expert_ids: ``[T, K]`` int32 or int64, of the experts of all workers.
            own_ids: by such an id, that on this worker, or -1; None where it holds all experts.
        """
        weights = weights.to(torch.float32)
        if own_ids is not None:
            expert_ids = own_ids[expert_ids]
        if torch.compiler.is_compiling():
            return mix(x, self.place, weights, expert_ids)
        return self.experts.forward(x, weights, expert_ids)

    def _built(self) -> Experts:
        # vLLM allocates what is loaded; here is only said in which form it is wanted.
        with torch.device("meta"):
            return Experts(self._site, self._spec)


def adopt_experts(layer: Any) -> None:
    """Let a ``RoutedExperts`` of vLLM, which is built and not loaded, use what is chosen here.

    One that cannot stays vLLM's own, with the reason in the report.

    Raises: NoCandidateError, UnknownNameError: the user pinned or required what cannot be had.
    """
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    settings = checkpoint_settings()
    if settings is None and not isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
        keep(layer.layer_name, "vLLM quantizes it while it loads")
        return
    try:
        if settings is not None:
            _choose_scheme(session(), settings)
        adoption = ExpertsAdoption(session(), layer)
    except InterposerError as error:
        keep(layer.layer_name, error)
        return
    with_method(layer, _AdoptedExperts, adoption=adoption, supports_pre_processed_weights=False)


def _choose_scheme(found: Session, settings: Mapping[str, Any]) -> None:
    """Let experts be stored by the checkpoint's scheme, which they ask for themselves."""
    try:
        found.scheme(settings)
    except UnknownNameError as error:
        # Not what the user asked for by name: the checkpoint did.
        raise ConfigError(str(error)) from error


class _AdoptedExperts:
    """Part of a method that asks ``adoption`` for the mixture, and ``own`` where it fails."""

    adoption: ExpertsAdoption
    own: Any
    # Some of vLLM's kernels choose the experts themselves; here its router does.
    is_monolithic = False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights for the chosen kernel; those of a form unknown stay vLLM's own."""
        try:
            self.adoption.finalize(layer)
        except InterposerError as error:
            keep(layer.layer_name, error)
            layer.quant_method = self.own
            self.own.process_weights_after_loading(layer)
            return
        session().taken.append(layer.layer_name)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return what vLLM's kernels would be told of plain weights: the parameters are empty."""
        from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG

        return FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return what the routed experts make of ``x``; vLLM computes shared ones before."""
        return self.adoption(x, topk_weights, topk_ids, layer.expert_map)


def _loaded(layer: Any, is_biased: bool) -> dict[str, Tensor | None]:
    """Return what vLLM loaded, without biases that it holds in case a checkpoint has some."""
    unused = set() if is_biased else {"w13_bias", "w2_bias"} - layer._loaded_expert_biases
    return {name: held for name, held in layer._parameters.items() if name not in unused}
