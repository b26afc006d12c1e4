"""Predicates that accept or refuse Triton kernels for a device; import neither torch nor triton."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from interposer import Request, Verdict
from interposer.errors import install_command

LEAST_VERSION = (3, 6)
"""The oldest supported triton, as major and minor version."""

INTERPRETER = "triton_interpreter"
"""The capability feature of a device whose kernels run on triton's interpreter."""

MOST_SPLIT_ROWS = 16
"""Maximum number of rows for split-K kernels: the rows of one matrix instruction."""

_INSTALL = install_command("interposer-ops[triton]")
# Distribution names of the package triton, including builds of vendors.
_DISTRIBUTIONS = (
    "triton",
    "pytorch-triton",
    "pytorch-triton-rocm",
    "triton-rocm",
    "pytorch-triton-xpu",
    "triton-xpu",
    "triton-windows",
)
# GPUs with so many compute units that few rows of tiles leave most units idle.
_SPLIT_K_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
# Triton backends by prefix of the architecture. For other prefixes, the platform declares the
# feature "triton" if triton has a backend for its device.
_BACKENDS = {"sm_": "nvidia", "gfx": "amd"}


def judge(request: Request) -> Verdict:
    """Accept the request if triton is installed, new enough, and has a backend for the device."""
    verdict = judge_package()
    if not verdict or INTERPRETER in request.capability.features:
        return verdict
    architecture = request.capability.architecture
    backend = next((b for prefix, b in _BACKENDS.items() if architecture.startswith(prefix)), "")
    if backend and backend not in _backends():
        available = ", ".join(sorted(_backends())) or "none"
        return Verdict.refuse(
            f"the installed triton has no backend {backend!r} for {architecture}; it has "
            f"{available}. Install the triton that your torch was released with"
        )
    return verdict


def judge_fp8(request: Request) -> Verdict:
    """Accept the request if ``judge`` does and triton can convert to the requested 8-bit float.

    The 8-bit float is the dim ``out_dtype`` or ``cache_dtype``, or else the request's dtype.

    Source: ``supported_fp8_dtypes`` of the backends of triton 3.7.1. The nvidia backend has
    float8_e4m3fn on sm_89 and newer, and no formats without infinities and negative zero (fnuz).
    The amd backend converts to all formats, if necessary in software; fnuz is accepted only on
    gfx942, whose hardware formats are fnuz.
    """
    if INTERPRETER in request.capability.features:
        return judge(request)
    dims = [request.dims[name] for name in ("out_dtype", "cache_dtype") if name in request.dims]
    dtype = str(dims[0]) if dims else request.dtype
    architecture = request.capability.architecture
    if dtype == "float8_e4m3fn" and (_compute_capability(architecture) or 89) < 89:
        return Verdict.refuse(f"triton has no {dtype} on {architecture}; it needs sm_89 or newer")
    return _judge_fnuz(request, dtype)


def judge_operands(request: Request) -> Verdict:
    """Accept the request if ``judge`` does and the kernels can multiply both 8-bit operands.

    Kernels convert formats that the hardware lacks bit by bit, except formats without infinities
    and negative zero (fnuz). These are accepted only on gfx942: the interpreter of triton 3.7.1
    cannot load fnuz numbers with a mask.
    """
    return _judge_fnuz(
        request, *(str(request.dims.get(n, "")) for n in ("x_dtype", "weight_dtype"))
    )


def judge_integers(request: Request) -> Verdict:
    """Accept the request if ``judge`` does and triton can multiply int8 matrices on the device.

    Triton 3.7.1 has no matrix instructions for NVIDIA GPUs older than sm_80. There, triton computes
    float matmuls without matrix instructions, and fails on int8 in the pass
    TritonGPUAccelerateMatmul.
    """
    architecture = request.capability.architecture
    if (_compute_capability(architecture) or 80) < 80:
        return Verdict.refuse(
            f"triton multiplies integers on sm_80 and newer, the device is {architecture}"
        )
    return judge(request)


def judge_split(request: Request) -> Verdict:
    """Accept the request if ``judge_operands`` does and split-K is faster here for few rows.

    The reason of an acceptance states the maximum number of rows.
    """
    architecture = request.capability.architecture
    is_interpreted = INTERPRETER in request.capability.features
    if not is_interpreted and architecture not in _SPLIT_K_ARCHITECTURES:
        names = ", ".join(_SPLIT_K_ARCHITECTURES)
        return Verdict.refuse(f"uses split-K on {names} only, the device is {architecture}")
    verdict = judge_operands(request)
    reason = f"uses split-K for up to {MOST_SPLIT_ROWS} rows, and another kernel for more rows"
    return Verdict.accept(reason) if verdict else verdict


@cache
def judge_package() -> Verdict:
    """Accept triton kernels if the package triton is installed and new enough."""
    if not _folder():
        return Verdict.refuse(f"needs the package triton, which is not installed: {_INSTALL}")
    installed = _version()
    if not installed:
        return Verdict.accept()  # built from source: no metadata states the version
    parts = tuple(int(part) for part in installed.split(".")[:2] if part.isdecimal())
    if parts < LEAST_VERSION:
        oldest = ".".join(map(str, LEAST_VERSION))
        return Verdict.refuse(f"needs triton {oldest} or newer, found {installed}: {_INSTALL}")
    return Verdict.accept()


def _judge_fnuz(request: Request, *dtypes: str) -> Verdict:
    """Accept the request if ``judge`` does; refuse fnuz dtypes, except on gfx942."""
    architecture = request.capability.architecture
    for dtype in dtypes:
        if dtype.endswith("fnuz") and architecture != "gfx942":
            return Verdict.refuse(f"takes {dtype} on gfx942 only, the device is {architecture}")
    return judge(request)


def _compute_capability(architecture: str) -> int | None:
    """Return the NVIDIA compute capability, such as 90 for sm_90a; None for other vendors."""
    number = architecture.removeprefix("sm_").rstrip("af")
    return int(number) if number.isdecimal() else None


def _folder() -> Path | None:
    """Return the installation folder of the package triton, or None if not installed."""
    spec = find_spec("triton")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _version() -> str:
    for name in _DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


@cache
def _backends() -> frozenset[str]:
    """Return the names of triton's built-in backends and of backends installed separately."""
    folder = _folder()
    built_in = folder.glob("backends/*/compiler.py") if folder else ()
    installed = {point.name for point in entry_points(group="triton.backends")}
    return frozenset({path.parent.name for path in built_in} | installed)
