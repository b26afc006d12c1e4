"""MoE layers of vLLM with experts that are stored and computed in a selected kernel's layout.

vLLM's router chooses the experts of each token, and vLLM's runner adds shared experts.

Shapes: T tokens, H hidden size, K chosen experts per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from interposer import Site
from interposer.errors import ConfigError, InterposerError, UnknownNameError
from interposer_ops.layers.moe.experts import Experts
from interposer_vllm._adoption import free_parameters
from interposer_vllm._expert_weights import fill_experts, finalize_experts
from interposer_vllm._experts_request import spec_of
from interposer_vllm._graph_ops import mix, new_slot, register_call
from interposer_vllm._methods import checkpoint_settings, keep_in_vllm, with_method
from interposer_vllm._session import Session, session

__all__ = ["ExpertsAdoption", "adopt_experts"]


class ExpertsAdoption:
    """The routed experts of one MoE layer, stored and computed by an ``Experts`` layer.

    Attributes:
        slot: the number by which compiled graphs call the experts.

    Args:
        layer: a ``RoutedExperts`` of vLLM that is built but not loaded.
    Raises: InterposerError: no scheme or no kernel accepts the layer.
    """

    def __init__(self, session: Session, layer: Any) -> None:
        device = session.placement.device.torch_device
        if torch.device(device).type != "cpu":
            raise ConfigError(
                f"interposer computes the experts of vLLM only on CPUs, not on {device!r}"
            )
        self.slot = new_slot()
        self._spec = spec_of(layer)
        self._site: Site = session.site(layer.layer_name, layer.params_dtype)
        self.experts = self._empty_experts()

    def finalize(self, layer: Any) -> None:
        """Prepare the loaded weights for the kernel, and free the unused weights.

        vLLM calls this method again after loading other weights into the layer.

        Raises: InterposerError: the weights have another layout than the kernel expects, or invalid
            values. The layer is unchanged then.
        """
        # New experts for reloaded weights: the old ones stay in use if preparation fails.
        experts = self._empty_experts() if self.experts.kernel else self.experts
        fill_experts(experts, _loaded(layer, self._spec.biased))
        operands = finalize_experts(experts)
        self.experts = experts
        register_call(self.slot, experts.forward, ())
        free_parameters(layer, operands)

    def __call__(
        self, x: Tensor, weights: Tensor, expert_ids: Tensor, local_ids: Tensor | None
    ) -> Tensor:
        """Compute the chosen experts of each token, and return the weighted sum ``[T, H]``.

        Args:
            x: ``[T, H]``.
            weights: ``[T, K]``, any float dtype.
            expert_ids: ``[T, K]`` int32 or int64, global ids.
            local_ids: maps a global id to the id on this worker, or to -1; None if this worker has
                all experts.
        """
        weights = weights.to(torch.float32)
        if local_ids is not None:
            expert_ids = local_ids[expert_ids]
        if torch.compiler.is_compiling():
            return mix(x, self.slot, weights, expert_ids)
        return self.experts.forward(x, weights, expert_ids)

    def _empty_experts(self) -> Experts:
        # These parameters state shapes and dtypes only: vLLM allocates and loads the weights.
        with torch.device("meta"):
            return Experts(self._site, self._spec)


def adopt_experts(layer: Any) -> None:
    """Let a selected kernel compute a ``RoutedExperts`` of vLLM that is built but not loaded.

    Experts that interposer cannot compute keep vLLM's method, with the reason in the report.

    Raises: NoCandidateError, UnknownNameError: the user pinned or required a kernel that cannot be
        used.
    """
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod

    settings = checkpoint_settings()
    if settings is None and not isinstance(layer.quant_method, UnquantizedFusedMoEMethod):
        keep_in_vllm(layer.layer_name, "vLLM quantizes it while it loads")
        return
    try:
        if settings is not None:
            _choose_scheme(session(), settings)
        adoption = ExpertsAdoption(session(), layer)
    except InterposerError as error:
        keep_in_vllm(layer.layer_name, error)
        return
    with_method(layer, _AdoptedExperts, adoption=adoption, supports_pre_processed_weights=False)


def _choose_scheme(worker_session: Session, settings: Mapping[str, Any]) -> None:
    """Choose the checkpoint's scheme now, because ``Experts`` reads the resolver's scheme."""
    try:
        worker_session.scheme(settings)
    except UnknownNameError as error:
        # The checkpoint named the scheme, not the user: the layer stays vLLM's own, no error.
        raise ConfigError(str(error)) from error


class _AdoptedExperts:
    """Mixin of a quantization method that computes experts by ``adoption``, else by vLLM."""

    adoption: ExpertsAdoption
    vllm_method: Any
    # Some of vLLM's kernels include the router; kernels of interposer take its result.
    is_monolithic = False

    def process_weights_after_loading(self, layer: Any) -> None:
        """Prepare the weights for the selected kernel, or let vLLM do so if the kernel cannot."""
        try:
            self.adoption.finalize(layer)
        except InterposerError as error:
            keep_in_vllm(layer.layer_name, error)
            layer.quant_method = self.vllm_method
            self.vllm_method.process_weights_after_loading(layer)
            return
        session().taken.append(layer.layer_name)

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        """Return the configuration of unquantized experts: the freed parameters have no scales."""
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
        """Compute the routed experts; vLLM has computed the shared experts before."""
        return self.adoption(x, topk_weights, topk_ids, layer.expert_map)


def _loaded(layer: Any, is_biased: bool) -> dict[str, Tensor | None]:
    """Return the loaded parameters, without biases that the checkpoint did not contain.

    vLLM allocates biases in case a checkpoint has some.
    """
    unused = set() if is_biased else {"w13_bias", "w2_bias"} - layer._loaded_expert_biases
    return {name: parameter for name, parameter in layer._parameters.items() if name not in unused}
