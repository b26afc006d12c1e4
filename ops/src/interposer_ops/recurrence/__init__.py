"""Ops with a state of fixed size per sequence: convolution, state space, linear attention.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.recurrence._causal_convolution import causal_convolution
    from interposer_ops.recurrence._delta_rule import gated_delta_rule
    from interposer_ops.recurrence._state_space import state_space_scan

# fmt: off
__all__ = [
    "causal_convolution", "gated_delta_rule", "state_space_scan",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_ops.recurrence._causal_convolution": "causal_convolution",
        "interposer_ops.recurrence._delta_rule": "gated_delta_rule",
        "interposer_ops.recurrence._state_space": "state_space_scan",
    },
)


def __dir__() -> list[str]:
    return __all__
