"""DeepSeek-V2: latent attention, and experts chosen by a softmax, group by group.

Source: arXiv:2405.04434.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from interposer_models._decoder.grouped_mixture import Grouping, count_of_routed_experts
from interposer_models._decoder.latent_family import LatentFamily
from interposer_models._decoder.settings import Positive


class DeepseekV2(LatentFamily):
    """DeepSeek-V2, including the Lite and Coder models, and V2.5.

    No checkpoint sets ``norm_topk_prob``. transformers ignores the field; the program published
    with the weights would renormalize without scaling.
    """

    is_balanced: ClassVar[bool] = False

    num_local_experts: Positive | None = count_of_routed_experts(64)
    moe_intermediate_size: Positive = 1407
    n_shared_experts: Annotated[int, Field(gt=0, lt=2**16)] = 2
    n_group: Positive | None = None  # type: ignore[assignment]
    topk_group: Positive | None = None  # type: ignore[assignment]
    # Other values are refused, as transformers and the published program disagree about them.
    norm_topk_prob: Literal[False] = False
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    scoring_func: Literal["softmax"] = "softmax"

    @property
    def grouping(self) -> Grouping:
        """Return the routing parameters: the best experts of all, or of the best groups."""
        num_groups, top_groups = 1, 1
        if self.topk_method == "group_limited_greedy":
            if self.n_group is None or self.topk_group is None:
                raise ValueError(
                    "topk_method is 'group_limited_greedy', so that n_group and "
                    "topk_group must be numbers"
                )
            num_groups, top_groups = self.n_group, self.topk_group
        return Grouping(num_groups, top_groups, False, self.routed_scaling_factor, "softmax")
