"""Random values for the parameters of a quantized layer, which may restrict their values."""

from __future__ import annotations

import torch


def random_parameter(parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draw values with the ``sample`` method of the parameter, or by dtype without one.

    Integers are drawn from their full range; floats from 0.5 to 1.5, so that they can be scales.
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
    # Draw bytes, because ``randint`` cannot cover the full range of int64.
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    assert limits.bits == 8 * dtype.itemsize
    return bits.view(dtype).reshape(shape)
