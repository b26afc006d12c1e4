"""How exactly libraries multiply, and what is drawn, as one value.

torch keeps these as settings of the process; whoever changes one changes it for everybody. Here
they are a policy that holds within a block.

Source: torch's notes on numerical accuracy (reduced precision reductions, TensorFloat-32) and its
``set_float32_matmul_precision``, which sets every backend that torch has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from interposer._contract.errors import ConfigError

_PRECISIONS = ("highest", "high", "medium")


@dataclass(frozen=True, slots=True)
class NumericsPolicy:
    """The defaults are what the definition of ``linear`` asks for.

    Attributes:
        float32: how products of float32 are computed: ``"highest"`` in float32, ``"high"`` with
            TensorFloat-32 or as three products of bfloat16, ``"medium"`` as one.
        reduce_in_16_bits: partial sums of products of 16 bits may be kept in 16 bits; a platform
            without such a setting keeps them in 32.
        seed: of all devices' generators; None leaves them.

    Raises: ConfigError: the precision is unknown.
    """

    float32: Literal["highest", "high", "medium"] = "highest"
    reduce_in_16_bits: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.float32 not in _PRECISIONS:
            known = ", ".join(_PRECISIONS)
            raise ConfigError(f"float32 is {self.float32!r}, must be one of {known}")


@contextmanager
def applied(policy: NumericsPolicy, reductions: Sequence[tuple[Any, str]] = ()) -> Iterator[None]:
    """Hold to ``policy`` within a block, and put back what held before.

    A graph that is captured inside keeps it; generators stay as the block leaves them.

    Args:
        reductions: where a platform's libraries are told whether sums may be kept in 16 bits, as
            objects and names of their attributes.
    """
    precision = torch.get_float32_matmul_precision()
    allowed = [getattr(owner, name) for owner, name in reductions]
    try:
        torch.set_float32_matmul_precision(policy.float32)
        for owner, name in reductions:
            setattr(owner, name, policy.reduce_in_16_bits)
        if policy.seed is not None:
            torch.manual_seed(policy.seed)
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for (owner, name), before in zip(reductions, allowed, strict=True):
            setattr(owner, name, before)
