"""Verdicts on AITER from its installed files, without importing AITER.

Importing AITER compiles modules and initialises HIP. AITER's kernels score below the portable
kernels, so only a preference or a pin of the user selects a kernel of AITER.

Source: the README of ROCm/aiter (distribution ``amd-aiter``, import name ``aiter``) and its issues
3846 (a build for other GPUs crashes the process), 4455 and 4456.
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
# The 8-bit float format that the matrix units of each architecture multiply.
_FP8_FORMATS = {"gfx942": "float8_e4m3fnuz", "gfx950": "float8_e4m3fn"}
NEEDS_FNUZ = frozenset({"gfx942"})
"""Architectures whose 8-bit floats are fnuz: without infinities and negative zero."""

BLOCK = 128
"""Rows and columns of a weight block that shares one scale."""

_LATENT, _ROTARY = 512, 64
_HEADS = (16, 128)


def aiter_version() -> str:
    """Return AITER's version: ``"unknown"`` without metadata, "" if AITER is not installed."""
    if not _folder():
        return ""
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def judge_device(architecture: str) -> Verdict:
    """Accept if AITER is installed and has kernels for the architecture."""
    if architecture not in ARCHITECTURES:
        supported = " and ".join(sorted(ARCHITECTURES))
        return Verdict.refuse(f"AITER has kernels for {supported}, the device is {architecture}")
    if _folder():
        return Verdict.accept()
    if find_spec("aiter") is not None:
        return Verdict.refuse(
            "the installed package aiter is another one, for asynchronous iterators. Try: "
            f"pip uninstall aiter, then {_INSTALL}"
        )
    return Verdict.refuse(f"needs AITER, which is not installed. Try: {_INSTALL}")


def judge_flash(spec: AttentionSpec, capability: Capability) -> Verdict:
    """Accept plain decoders over a 16-bit cache, optionally with a window or softcap."""
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in ("bfloat16", "float16"):
        return Verdict.refuse(f"computes in floats of 16 bits, got {spec.dtype}")
    if spec.head_size % 8 or spec.head_size > 256:
        return Verdict.refuse(f"head_size is {spec.head_size}, must be a multiple of 8 up to 256")
    return _first_refusal(spec.judge_plain_decoder(), judge_device(capability.architecture))


def judge_latent(request: Request) -> Verdict:
    """Accept DeepSeek's latent sizes over a cache of 16 or 8 bits."""
    dims, architecture = request.dims, request.capability.architecture
    sizes = (dims.get(name) for name in ("latent_size", "rotary_size", "num_heads"))
    cache_dtype = str(dims.get("cache_dtype"))
    dtypes = (request.dtype, _FP8_FORMATS.get(architecture, ""))
    verdict = _first_refusal(judge_latent_sizes(*sizes), judge_device(architecture))
    if verdict and cache_dtype not in dtypes:
        return Verdict.refuse(
            f"reads caches of {' or '.join(dtypes)} on {architecture}, got {cache_dtype}"
        )
    return verdict


def judge_latent_sizes(latent: object, rotary: object, num_heads: object) -> Verdict:
    """Accept the latent sizes and head counts that AITER's MLA kernels are compiled for."""
    if (latent, rotary) != (_LATENT, _ROTARY):
        return Verdict.refuse(f"needs latents of {_LATENT} + {_ROTARY}, got {latent} + {rotary}")
    if num_heads not in _HEADS:
        return Verdict.refuse(f"num_heads is {num_heads}, must be one of {_HEADS}")
    return Verdict.accept()


def judge_experts(request: Request) -> Verdict:
    """Accept if AITER is installed for the device; the records declare the other limits."""
    return judge_device(request.capability.architecture)


def judge_scaled_experts(request: Request) -> Verdict:
    """Accept weight scales per matrix, per output, or per block of 128 by 128."""
    dims = request.dims
    blocks = dims.get("block_rows"), dims.get("block_columns")
    if dims.get("granularity") == "block" and blocks != (BLOCK, BLOCK):
        return Verdict.refuse(
            f"takes scales of blocks of {BLOCK} by {BLOCK}, got {blocks[0]} by {blocks[1]}"
        )
    verdict = judge_device(request.capability.architecture)
    return Verdict.accept("rounds activations to 8-bit floats") if verdict else verdict


def is_quantized(dims: Mapping[str, object], dtype: str) -> bool:
    """Say whether the cache is quantized, that is, has another dtype than the request."""
    return dims.get("cache_dtype", dtype) != dtype


def _first_refusal(*verdicts: Verdict) -> Verdict:
    """Return the first refusal, or the last verdict."""
    return next((verdict for verdict in verdicts if not verdict), verdicts[-1])


def _folder() -> Path | None:
    """Return the folder of AITER, or None if AITER is not installed.

    PyPI also has an unrelated package ``aiter``, which is a single module without ``ops``.
    """
    spec = find_spec("aiter")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if Path(location, "ops").is_dir():
            return Path(location)
    return None
