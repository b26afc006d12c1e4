"""DeepSeek-V2: latent attention, and experts of which a softmax chooses, groups of them first.

Source: arXiv:2405.04434.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from interposer_models._decoder.grouped_mixture import Grouping, count_of_routed_experts
from interposer_models._decoder.latent_family import LatentFamily
from interposer_models._decoder.settings import Positive


class DeepseekV2(LatentFamily):
    """DeepSeek-V2, its Lite and Coder models, and V2.5.

    No checkpoint has ``norm_topk_prob``: for transformers it means nothing, and for the program
    that was published with the weights, sums of 1 that are not scaled.
    """

    is_balanced: ClassVar[bool] = False

    num_local_experts: Positive | None = count_of_routed_experts(64)
    moe_intermediate_size: Positive = 1407
    n_shared_experts: Annotated[int, Field(gt=0, lt=2**16)] = 2
    n_group: Positive | None = None  # type: ignore[assignment]
    topk_group: Positive | None = None  # type: ignore[assignment]
    norm_topk_prob: Literal[False] = False
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"

    @property
    def grouping(self) -> Grouping:
        """Return the choice of experts: the best of all, or of the best groups."""
        groups, chosen = 1, 1
        if self.topk_method == "group_limited_greedy":
            if self.n_group is None or self.topk_group is None:
                raise ValueError(
                    "topk_method is 'group_limited_greedy', so that n_group and "
                    "topk_group must be numbers"
                )
            groups, chosen = self.n_group, self.topk_group
        return Grouping(groups, chosen, False, self.routed_scaling_factor, "softmax")
