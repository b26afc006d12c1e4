"""DeepSeek-V3: latent attention, and grouped experts balanced by a score correction bias.

Kimi K2 is the same architecture with more experts in one group. Source: arXiv:2412.19437.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AliasChoices, Field

from interposer_models._decoder.grouped_mixture import count_of_routed_experts
from interposer_models._decoder.latent_family import LatentFamily
from interposer_models._decoder.settings import Positive


class DeepseekV3(LatentFamily):
    """DeepSeek-V3, R1 and Kimi K2; the decoder does not run the MTP layers."""

    num_local_experts: Positive | None = count_of_routed_experts(256)
    num_experts_per_tok: Positive | None = 8
    moe_intermediate_size: Positive = 2048
    first_k_dense_replace: Annotated[int, Field(ge=0)] = 3
    n_group: Positive = 8
    topk_group: Positive = 4
    routed_scaling_factor: Annotated[float, Field(gt=0)] = 2.5
    topk_method: Literal["noaux_tc"] = "noaux_tc"
    scoring_func: Literal["sigmoid"] = "sigmoid"
    # False means that the rotary elements are stored as two halves.
    rope_interleave: bool = True
    num_nextn_predict_layers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=1, validation_alias=AliasChoices("num_nextn_predict_layers", "num_mtp_layers")
    )

    @property
    def interleaved(self) -> bool:
        """Adjacent elements are rotated, not the halves of the rotary part."""
        return self.rope_interleave
