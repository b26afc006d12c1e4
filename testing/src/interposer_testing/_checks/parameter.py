"""Random numbers that may stand in the parameters of a quantized layer."""

from __future__ import annotations

import torch


def random_parameter(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return what ``sample`` of a parameter draws, else numbers by its dtype.

    Integers over their whole range; floats between 0.5 and 1.5, so that they may be scales.
    """
    sample = getattr(parameter, "sample", None)
    if sample is not None:
        return sample(generator)  # type: ignore[no-any-return]
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if dtype.is_floating_point:
        return (0.5 + torch.rand(shape, generator=generator)).to(dtype)
    limits = torch.iinfo(dtype)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    assert limits.bits == 8 * dtype.itemsize
    return bits.view(dtype).reshape(shape)
