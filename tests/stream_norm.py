"""A third party's plugin, registered in code: a norm whose residual stream has to be float32."""

from __future__ import annotations

import torch

from interposer import Dim, Kernel, Requires, hookimpl


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the op ``fused_add_rms_norm``.

    Raises: TypeError: as the library behind it would, for a residual that is not float32.
    """
    if residual.dtype != torch.float32:
        raise TypeError(f"the residual is {residual.dtype}, must be torch.float32")
    total = residual.add(x)
    return torch.rms_norm(total, weight.shape, weight.float(), eps).to(x.dtype), total


@hookimpl
def interposer_records() -> list[Kernel]:
    """Return the kernel."""
    dims = {"residual_dtype": Dim(one_of=("float32",))}
    target = f"{__name__}:add_norm"
    requires = Requires(dtypes=("float32", "bfloat16"), dims=dims)
    properties = frozenset({"deterministic", "traceable"})
    return [
        Kernel(
            "fused_add_rms_norm",
            "fused_add_rms_norm_stream",
            target,
            requires=requires,
            score=50,
            properties=properties,
        )
    ]
