"""Choice of the dtype that a model computes in."""

from __future__ import annotations

import torch

from interposer import Placement
from interposer.errors import UnknownNameError

DTYPES = ("float32", "bfloat16", "float16")


def compute_dtype(requested: str | torch.dtype, stored: str, placement: Placement) -> torch.dtype:
    """Return the requested dtype; ``"auto"`` is the stored dtype on platforms that support it.

    Raises: UnknownNameError: there is no such dtype, or the platform does not support it.
    """
    supported = placement.platform.dtypes(placement.device.torch_device)
    name = str(requested).removeprefix("torch.")
    if name == "auto":
        by_name = {str(dtype).removeprefix("torch."): dtype for dtype in supported}
        return by_name.get(stored, supported[0])
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, (*DTYPES, "auto"))
    dtype: torch.dtype = getattr(torch, name)
    if dtype not in supported:
        supported_names = [str(d).removeprefix("torch.") for d in supported]
        where = f"on platform {placement.platform.name!r}"
        raise UnknownNameError("dtype", name, supported_names, where=where)
    return dtype
