"""Checkpoints of auto-round, which Intel Neural Compressor calls ``inc``.

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
    """Codes of 4 or 8 bits in the words of GPTQ or AWQ, by layer."""

    method = "auto-round"
    settings_class = Settings
    settings: Settings
    mend = _MEND

    def _method(self, stored: Stored) -> LinearMethod:
        """Return the method for linear layers that are stored so."""
        if isinstance(stored, awq_config.Weights):
            return AWQLinear(stored)
        return GPTQLinear(stored) if self.settings.has_order else UnorderedGPTQLinear(stored)

    def head_method(self, prefix: str) -> LinearMethod | None:
        """Return the method for a head that ``extra_config`` names, or None to leave it plain."""
        return self.linear_method(prefix, (prefix,)) if self.settings.names(prefix) else None

    def _experts_at_once(
        self, stored: Stored, site: Site, spec: ExpertsSpec
    ) -> ExpertsMethod | None:
        if isinstance(stored, gptq_config.Weights):
            return gptq_experts(stored, self.settings.has_order)
        return awq_experts(stored)


class INC(AutoRound):
    """The same format under its other name."""

    method = "inc"


class UnorderedGPTQLinear(GPTQLinear):
    """Words of GPTQ without ``g_idx``: groups follow each other."""

    def create_weights(
        self, layer: nn.Module, site: Site, in_features: int, out_features: int, bias: bool
    ) -> None:
        """Register what every packed layer has, and no order."""
        PackedLinear.create_weights(self, layer, site, in_features, out_features, bias)

    def groups(self, layer: nn.Module) -> torch.Tensor | None:
        """Return None: groups follow each other."""
        return None
