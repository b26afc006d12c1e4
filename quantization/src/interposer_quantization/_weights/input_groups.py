"""Check of ``g_idx``, the tensor that assigns each input to a quantization group.

Dimensions: I input features.
"""

from __future__ import annotations

import torch

from interposer.errors import CheckpointError


def check_groups(name: str, groups: torch.Tensor, num_groups: int) -> None:
    """Check that every group index is valid and all groups have the same size.

    Args:
        name: of the tensor, for errors.
        groups: ``[I]`` integer, the group of every input.
    Raises: CheckpointError: an index is out of range, or the groups differ in size.
    """
    size = len(groups) // num_groups
    is_out_of_range = (groups < 0) | (groups >= num_groups)
    if is_out_of_range.any():
        index = int(is_out_of_range.nonzero()[0])
        raise CheckpointError(
            name,
            f"holds the group {int(groups[index])} for input {index}, must be from 0 to "
            f"{num_groups - 1}",
            "copy the checkpoint again, or correct group_size in quantization_config",
        )
    # Kernels need groups of one size.
    counts = groups.bincount(minlength=num_groups)
    if (counts != size).any():
        group = int((counts != size).nonzero()[0])
        raise CheckpointError(
            name,
            f"assigns {int(counts[group])} inputs to group {group}, must be {size}",
            "copy the checkpoint again, or quantize again: all groups are of one size",
        )
