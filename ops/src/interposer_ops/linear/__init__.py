"""Dense linear layers.

Every name is loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_ops.linear._linear import batched_linear, grouped_linear, linear

# fmt: off
__all__ = [
    "batched_linear", "grouped_linear", "linear",
]
# fmt: on

__getattr__ = lazy_attributes(
    __name__, {"interposer_ops.linear._linear": "batched_linear grouped_linear linear"}
)


def __dir__() -> list[str]:
    return __all__
