"""The groups of a weight's inputs, as a checkpoint stores them.

Dimensions: I input features.
"""

from __future__ import annotations

import torch

from interposer.errors import CheckpointError


def check_groups(name: str, groups: torch.Tensor, num_groups: int) -> None:
    """Refuse groups that are not of one size.

    Args:
        name: of the tensor, for errors.
        groups: ``[I]`` integer, the group of every input.
    Raises: CheckpointError: a number is none of a group, or a group has more or fewer inputs.
    """
    size = len(groups) // num_groups
    outside = (groups < 0) | (groups >= num_groups)
    if outside.any():
        place = int(outside.nonzero()[0])
        raise CheckpointError(
            name,
            f"holds the group {int(groups[place])} for input {place}, must be from 0 to "
            f"{num_groups - 1}",
            "copy the checkpoint again, or correct group_size in quantization_config",
        )
    counts = groups.bincount(minlength=num_groups)
    if (counts != size).any():
        group = int((counts != size).nonzero()[0])
        raise CheckpointError(
            name,
            f"assigns {int(counts[group])} inputs to group {group}, must be {size}",
            "copy the checkpoint again, or quantize again: all groups are of one size",
        )
