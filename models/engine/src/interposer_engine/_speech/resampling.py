"""Change of a sound's sampling rate by a windowed sinc filter.

Dimensions: S samples, P phases (outputs until the positions repeat), K filter taps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

# The filter passes 95 % of the smaller band, and reaches 48 zeros of its sinc on each side. The
# Kaiser window with this beta suppresses the rest by more than 80 dB.
_PASSED = 0.95
_ZEROS = 48
_BETA = 8.5


def resample(samples: Tensor, rate: int, target_rate: int) -> Tensor:
    """Return a sound ``[S]`` with ``target_rate`` instead of ``rate`` samples per second.

    The result has ``ceil(S * target_rate / rate)`` samples.
    """
    if rate == target_rate:
        return samples
    divisor = math.gcd(rate, target_rate)
    step, num_phases = rate // divisor, target_rate // divisor
    num_outputs = -(-len(samples) * num_phases // step)
    cutoff = _PASSED * min(1.0, num_phases / step)
    reach = math.ceil(_ZEROS / cutoff)
    # Output i lies at the position i * step / num_phases of the input.
    num_steps = -(-num_outputs // num_phases)
    padding = reach, reach + num_steps * step - len(samples) + 1
    padded = functional.pad(samples.to(torch.float32), padding)
    outputs = torch.empty(num_steps, num_phases)
    # A short sound has fewer outputs than phases, if the rates have no common divisor.
    for phase in range(min(num_phases, num_outputs)):
        first, remainder = divmod(phase * step, num_phases)
        weights = _taps(remainder / num_phases, cutoff, reach)
        # Every step of the input repeats the phase: the rows overlap in memory.
        rows = padded.as_strided((num_steps, len(weights)), (step, 1), first)
        outputs[:, phase] = rows @ weights
    return outputs.flatten()[:num_outputs]


def _taps(fraction: float, cutoff: float, reach: int) -> Tensor:
    """Return the weights ``[2 * reach + 1]`` of the inputs around an output position."""
    offsets = torch.arange(-reach, reach + 1, dtype=torch.float64) - fraction
    ratio = (offsets / (reach + 1)).clamp(-1, 1)
    window = torch.special.i0(_BETA * (1 - ratio.square()).sqrt())
    weights: Tensor = torch.sinc(cutoff * offsets) * window
    # A constant input stays unchanged.
    return weights.div(weights.sum()).to(torch.float32)
