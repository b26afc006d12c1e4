"""The error of a request with logits that are not finite."""

from __future__ import annotations

from interposer.errors import InterposerError


class NonFiniteError(InterposerError, ArithmeticError):
    """A model computed NaN or infinity, so that the result is meaningless."""


def non_finite(result: str) -> NonFiniteError:
    """Create the error for a result that is not finite.

    Args:
        result: Name of the result, with the position.
    """
    return NonFiniteError(
        f"{result} are not finite: the weights hold NaN or infinite numbers, or a layer computed "
        "some. Try: dtype='float32' if the model computes in float16; else copy the checkpoint "
        "again, and look for NaN in its tensors"
    )
