"""The dtype that a model computes in."""

from __future__ import annotations

import torch

from interposer import Placement
from interposer.errors import UnknownNameError

DTYPES = ("float32", "bfloat16", "float16")


def compute_dtype(wanted: str | torch.dtype, stored: str, placement: Placement) -> torch.dtype:
    """Return what was asked for; ``"auto"`` is the stored one where the platform offers it.

    Raises: UnknownNameError: there is no such dtype, or the platform does not offer it.
    """
    offered = placement.platform.dtypes(placement.device.torch_device)
    name = str(wanted).removeprefix("torch.")
    if name == "auto":
        by_name = {str(dtype).removeprefix("torch."): dtype for dtype in offered}
        return by_name.get(stored, offered[0])
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, (*DTYPES, "auto"))
    dtype: torch.dtype = getattr(torch, name)
    if dtype not in offered:
        listed = [str(d).removeprefix("torch.") for d in offered]
        where = f"on platform {placement.platform.name!r}"
        raise UnknownNameError("dtype", name, listed, where=where)
    return dtype
