"""Scheme of auto-round checkpoints, which Intel Neural Compressor calls ``inc``.

Source: the exporters of auto-round 0.16, ``export_to_autoround`` and ``export_to_awq``.
"""

from __future__ import annotations

import torch
from torch import nn

from interposer import ExpertsMethod, ExpertsSpec, LinearMethod, Site
from interposer_quantization._auto_round.config import Settings, Stored
from interposer_quantization._awq import config as awq_config
from interposer_quantization._awq.scheme import AWQLinear, awq_experts
from interposer_quantization._gptq import config as gptq_config
from interposer_quantization._gptq.scheme import GPTQLinear, gptq_experts
from interposer_quantization._scheme import StoredScheme
from interposer_quantization._weights.packed_linear import PackedLinear

_MEND = "give them the same bits, group_size and sym, or leave all of them plain"


class AutoRound(StoredScheme):
    """Scheme of auto-round checkpoints: GPTQ or AWQ packing, with per-layer settings."""

    method = "auto-round"
    settings_class = Settings
    settings: Settings
    mend = _MEND

    def _method(self, stored: Stored) -> LinearMethod:
        if isinstance(stored, awq_config.Weights):
            return AWQLinear(stored)
        return GPTQLinear(stored) if self.settings.has_order else UnorderedGPTQLinear(stored)

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for an lm_head that ``extra_config`` names, else None (unquantized)."""
        return self.linear_method(prefix, (prefix,)) if self.settings.has_override(prefix) else None

    def _fused_experts_method(
        self, stored: Stored, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        if isinstance(stored, gptq_config.Weights):
            return gptq_experts(stored, self.settings.has_order)
        return awq_experts(stored)


class INC(AutoRound):
    """Scheme of auto-round checkpoints with the method name ``inc``."""

    method = "inc"


class UnorderedGPTQLinear(GPTQLinear):
    """GPTQ linear method without ``g_idx``: groups are consecutive."""

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register the tensors of ``PackedLinear``, without ``g_idx``."""
        # Not super(): GPTQLinear would register g_idx.
        PackedLinear.create_weights(self, layer, site, in_features, out_features, bias)

    def groups(self, layer: nn.Module) -> torch.Tensor | None:
        """Return None instead of the group of each input: groups are consecutive."""
        return None
