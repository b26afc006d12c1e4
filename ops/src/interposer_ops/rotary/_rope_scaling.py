"""Tables of rotary angles, with RoPE scaling for longer contexts.

Sources: arXiv:2104.09864 (rotary), the Llama 3.1 release (frequency bands), arXiv:2309.00071
(YaRN), arXiv:2402.13753 (LongRoPE).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from interposer.errors import ConfigError, UnknownNameError

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def rotary_table(
    num_positions: int,
    rotary_size: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    longest: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``(cos, sin)``, each ``[L, R / 2]`` float32, for positions 0 to L - 1.

    Args:
        num_positions: L.
        rotary_size: R, even.
        theta: base of the geometric series of wavelengths.
        scaling: ``rope_type`` with its parameters, by their names in Hugging Face configs.
        longest: maximum context length, which selects the factors of ``longrope``; L by default.
    Raises: ConfigError: ``rope_type`` is unknown, or a parameter is missing or invalid.
    """
    context = num_positions if longest is None else longest
    frequencies, magnitude = rotary_frequencies(rotary_size, theta, scaling, context)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotary_frequencies(
    rotary_size: int,
    theta: float,
    scaling: Mapping[str, Any] | None = None,
    num_positions: int | None = None,
) -> tuple[Tensor, float]:
    """Return the rotary angle per position, ``[R / 2]`` float32, and the table's magnitude.

    Args:
        num_positions: maximum context length, which selects the factors of ``longrope`` and the
            base of ``dynamic``; by default the original context length. Other types ignore it.
    Raises: ConfigError: ``rope_type`` is unknown, or a parameter is missing or invalid.
    """
    if rotary_size <= 0 or rotary_size % 2:
        raise ConfigError(f"rotary_size is {rotary_size}, must be positive and even")
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.int64).float() / rotary_size
    plain = 1.0 / (theta**exponents)
    if scaling is None:
        return plain, 1.0
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    try:
        if kind == "default":
            return plain, 1.0
        if kind == "linear":
            return plain / _number(scaling, "factor"), 1.0
        if kind == "dynamic":
            return _dynamic(rotary_size, theta, scaling, num_positions), 1.0
        if kind == "proportional":
            return _proportional(plain, scaling), 1.0
        if kind == "llama3":
            return _llama3(plain, scaling), 1.0
        if kind == "yarn":
            return _yarn(plain, rotary_size, theta, scaling)
        if kind == "longrope":
            return _longrope(plain, scaling, num_positions)
    except KeyError as error:
        raise ConfigError(f"rope_type {kind!r} needs the parameter {error}") from error
    raise UnknownNameError("rope_type", kind, ROPE_TYPES)


def _dynamic(
    rotary_size: int, theta: float, scaling: Mapping[str, Any], num_positions: int | None
) -> Tensor:
    """Increase the RoPE base for contexts beyond ``max_position_embeddings`` (dynamic NTK)."""
    longest = _number(scaling, "max_position_embeddings")
    factor, context = _number(scaling, "factor"), max(num_positions or 0, longest)
    # The exponent R / (R - 2) is undefined for a single pair.
    if rotary_size > 2:
        growth = factor * context / longest - (factor - 1)
        theta *= growth ** (rotary_size / (rotary_size - 2))
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.int64).float() / rotary_size
    return 1.0 / (theta**exponents)


def _proportional(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Rotate only the fastest pairs, a fraction ``partial_rotary_factor`` of all pairs.

    The wavelengths are those of a full rotation, unlike with a smaller rotary size.
    """
    fraction = _number(scaling, "partial_rotary_factor", 1.0)
    is_rotated = torch.arange(len(plain)) < int(fraction * len(plain))
    return torch.where(is_rotated, plain / _number(scaling, "factor", 1.0), 0.0)


def _llama3(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """Stretch long wavelengths by ``factor``, keep short ones, and interpolate between."""
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low > high:
        raise ConfigError(f"low_freq_factor {low} must not be above high_freq_factor {high}")
    turns = _number(scaling, "original_max_position_embeddings") * plain / (2 * math.pi)
    # Llama 4 Scout has equal bounds, so that no wavelength is between long and short.
    keep = (turns >= low).float() if low == high else ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (keep + (1 - keep) / factor)


def _yarn(
    plain: Tensor, rotary_size: int, theta: float, scaling: Mapping[str, Any]
) -> tuple[Tensor, float]:
    """Stretch wavelengths with few turns over the original context (YaRN), and keep the others."""
    factor = _number(scaling, "factor")
    original = _number(scaling, "original_max_position_embeddings")

    # Index of the pair that makes ``turns`` turns over the original context.
    def dimension(turns: float) -> float:
        return rotary_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = dimension(_number(scaling, "beta_fast", 32))
    last = dimension(_number(scaling, "beta_slow", 1))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_size - 1)
    # The lower bound avoids a division by zero if both ends are equal.
    ramp = (torch.arange(rotary_size // 2, dtype=torch.float32) - first) / max(last - first, 0.001)
    stretched = ramp.clamp(0, 1)
    if scaling.get("attention_factor") is None:
        magnitude = _yarn_magnitude(factor, scaling)
    else:
        magnitude = _number(scaling, "attention_factor")
    return plain * (1 - stretched) + plain / factor * stretched, magnitude


def _yarn_magnitude(factor: float, scaling: Mapping[str, Any]) -> float:
    def attention_scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        mscale, mscale_all_dim = _number(scaling, "mscale"), _number(scaling, "mscale_all_dim")
        return attention_scale(mscale) / attention_scale(mscale_all_dim)
    return attention_scale(1.0)


def _longrope(
    plain: Tensor, scaling: Mapping[str, Any], num_positions: int | None
) -> tuple[Tensor, float]:
    """Divide each pair's frequency by the pair's factor, from the long or the short set.

    All positions of a table use the same set, so that a distance has the same angle everywhere: the
    long set if the context can exceed the original context length.
    """
    original = _number(scaling, "original_max_position_embeddings")
    is_long = num_positions is not None and num_positions > original
    factors = _factors(scaling, "long_factor" if is_long else "short_factor", len(plain))
    if scaling.get("attention_factor") is not None:
        return plain / factors, _number(scaling, "attention_factor")
    if scaling.get("factor") is not None:
        growth = _number(scaling, "factor")
    else:
        growth = _number(scaling, "max_position_embeddings") / original
    magnitude = math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0
    return plain / factors, magnitude


def _factors(scaling: Mapping[str, Any], name: str, count: int) -> Tensor:
    """Return the ``count`` = R / 2 positive factors of parameter ``name``."""
    values = scaling[name]
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) != count:
        raise ConfigError(f"the rotary parameter {name!r} is {values!r}, must be {count} numbers")
    return torch.tensor([_number({name: value}, name) for value in values])


def _number(scaling: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """Return a positive parameter; ``default`` replaces a missing, null or zero value."""
    value = scaling[name] if default is None else scaling.get(name) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"the rotary parameter {name!r} is {value!r}, must be a positive number")
    return float(value)
