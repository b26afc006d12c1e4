"""The error of a request whose result is NaN."""

from __future__ import annotations

from interposer.errors import InterposerError


class NonFiniteError(InterposerError, ArithmeticError):
    """A model computed NaN, so that its result means nothing."""


def non_finite(result: str) -> NonFiniteError:
    """Return the error of a result that is NaN.

    Args:
        result: its name, with the place.
    """
    return NonFiniteError(
        f"{result} are not finite: the weights hold NaN or infinite numbers, or a layer computed "
        "some. Try: dtype='float32' if the model computes in float16; else copy the checkpoint "
        "again, and look for NaN in its tensors"
    )
