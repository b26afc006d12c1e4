"""Verdicts on AITER for a device, from its files, without importing it.

Its import compiles modules and initialises HIP, so that nothing here does it. That it is found and
for the device does not make it wanted: kernels of it have scores below the portable ones, and a
policy that prefers or pins them takes them.

Source: the README of ROCm/aiter (distribution ``amd-aiter``, import name ``aiter``) and its issues
3846 (what is built for other GPUs ends the process with a signal), 4455 and 4456.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from interposer import Request, Verdict

if TYPE_CHECKING:
    from interposer import AttentionSpec, Capability

ARCHITECTURES = frozenset({"gfx942", "gfx950"})
"""Architectures that AITER's kernels are written for."""

_INSTALL = "pip install amd-aiter"
_DISTRIBUTIONS = ("amd-aiter", "aiter")
# The 8-bit float that matrix units of each multiply.
_FP8 = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}
NEEDS_FNUZ = frozenset({"gfx942"})
"""Architectures whose 8-bit floats have neither infinities nor a negative zero."""

BLOCK = 128
"""Outputs and inputs of a block of a weight that has a scale."""

_LATENT, _ROTARY = 512, 64
_HEADS = (16, 128)


def aiter_version() -> str:
    """Return the installed version; ``"unknown"`` without metadata, empty where there is none."""
    if not _folder():
        return ""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def judge_device(architecture: str) -> Verdict:
    """Accept where AITER is installed and has kernels for the architecture."""
    if architecture not in ARCHITECTURES:
        known = " and ".join(sorted(ARCHITECTURES))
        return Verdict.refuse(f"AITER has kernels for {known}, the device is {architecture}")
    if _folder():
        return Verdict.accept()
    if find_spec("aiter") is not None:
        return Verdict.refuse(
            "the installed package aiter is another one, for asynchronous iterators. Try: "
            f"pip uninstall aiter, then {_INSTALL}"
        )
    return Verdict.refuse(f"needs AITER, which is not installed. Try: {_INSTALL}")


def judge_flash(spec: AttentionSpec, capability: Capability) -> Verdict:
    """Accept decoders with a plain cache of 16 bits, windowed or softcapped."""
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16"):
        return Verdict.refuse(f"computes in floats of 16 bits, got {spec.dtype}")
    if spec.head_size % 8 or spec.head_size > 256:
        return Verdict.refuse(f"head_size is {spec.head_size}, must be a multiple of 8 up to 256")
    return _first(spec.judge_plain_decoder(), judge_device(capability.architecture))


def judge_latent(request: Request) -> Verdict:
    """Accept the sizes of DeepSeek's latent attention, over a cache of 16 or 8 bits."""
    dims, architecture = request.dims, request.capability.architecture
    sizes = (dims.get(name) for name in ("latent_size", "rotary_size", "num_heads"))
    stored = str(dims.get("cache_dtype"))
    wanted = (request.dtype, _FP8.get(architecture, ""))
    verdict = _first(judge_latent_sizes(*sizes), judge_device(architecture))
    if verdict and stored not in wanted:
        return Verdict.refuse(
            f"reads caches of {' or '.join(wanted)} on {architecture}, got {stored}"
        )
    return verdict


def judge_latent_sizes(latent: object, rotary: object, num_heads: object) -> Verdict:
    """Accept the sizes that its kernels of latent attention are compiled for."""
    if (latent, rotary) != (_LATENT, _ROTARY):
        return Verdict.refuse(f"needs latents of {_LATENT} + {_ROTARY}, got {latent} + {rotary}")
    if num_heads not in _HEADS:
        return Verdict.refuse(f"num_heads is {num_heads}, must be one of {_HEADS}")
    return Verdict.accept()


def judge_experts(request: Request) -> Verdict:
    """Accept where AITER is installed; the records declare its limits."""
    return judge_device(request.capability.architecture)


def judge_scaled_experts(request: Request) -> Verdict:
    """Accept scales per matrix, per output and per block of 128 by 128, and say what is rounded."""
    dims = request.dims
    blocks = dims.get("block_rows"), dims.get("block_columns")
    if dims.get("granularity") == "block" and blocks != (BLOCK, BLOCK):
        return Verdict.refuse(
            f"takes scales of blocks of {BLOCK} by {BLOCK}, got {blocks[0]} by {blocks[1]}"
        )
    verdict = judge_device(request.capability.architecture)
    return Verdict.accept("rounds activations to 8-bit floats") if verdict else verdict


def is_quantized(dims: Mapping[str, object], dtype: str) -> bool:
    """Say whether a cache is of another dtype than the request's."""
    return dims.get("cache_dtype", dtype) != dtype


def _first(*verdicts: Verdict) -> Verdict:
    """Return the first refusal, or the last verdict."""
    return next((verdict for verdict in verdicts if not verdict), verdicts[-1])


def _folder() -> Path | None:
    """Return the folder of AITER; the package of that name on PyPI is a single module."""
    spec = find_spec("aiter")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if Path(place, "ops").is_dir():
            return Path(place)
    return None
