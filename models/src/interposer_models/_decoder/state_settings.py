"""Types and checks of config.json fields that shape recurrent states."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

_LARGEST_STATE = 2**28

Window = Annotated[int, Field(ge=2, le=8)]
"""Tokens that a convolution reads, the current one included."""


def _number(value: Any) -> Any:
    """Unwrap a number of config.json; transformers writes infinity as ``{"__float__": ...}``."""
    return value.get("__float__") if isinstance(value, dict) else value


_Step = Annotated[float, Field(ge=0, allow_inf_nan=True), BeforeValidator(_number)]
Steps = tuple[_Step, _Step]
"""The smallest and the largest step of a state space."""


def check_state(heads: int, rows: int, columns: int) -> None:
    """Raise ValueError if a layer's state would be larger than in any model."""
    if heads * rows * columns > _LARGEST_STATE:
        raise ValueError(
            f"a state of {heads} heads of {rows} x {columns} is more than a model can have"
        )


def check_convolution(field: str, activation: str) -> None:
    """Raise ValueError if the activation after the convolution is not SiLU."""
    if activation not in ("silu", "swish"):
        raise ValueError(f"{field} is {activation!r}, convolutions compute with 'silu'")
