"""The verdict on compiling a Triton kernel for a device, without importing torch or triton."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path

from interposer import Request, Verdict

LEAST_VERSION = (3, 6)
"""The oldest triton that the kernels are written for, as major and minor."""

INTERPRETER = "triton_interpreter"
"""The capability feature of a device on which kernels are interpreted instead of compiled."""

MOST_SPLIT_ROWS = 16
"""Up to how many rows products split their sums: those of one matrix instruction."""

_INSTALL = "pip install 'interposer-ops[triton]'"
# What the package is distributed as; builds of vendors have names of their own.
_DISTRIBUTIONS = (
    "triton",
    "pytorch-triton",
    "pytorch-triton-rocm",
    "triton-rocm",
    "pytorch-triton-xpu",
    "triton-xpu",
    "triton-windows",
)
# Where sums are split: GPUs of so many units that the tiles of few rows leave most of them idle.
_SPLITTING = ("gfx90a", "gfx942", "gfx950")
# The backend of triton that compiles for an architecture. What begins otherwise is left to the
# platform, which declares the feature "triton" where its device has a backend.
_BACKENDS = {"sm_": "nvidia", "gfx": "amd"}


def judge(request: Request) -> Verdict:
    """Accept where triton is installed, new enough, and has a backend for the device."""
    verdict = judge_package()
    if not verdict or INTERPRETER in request.capability.features:
        return verdict
    architecture = request.capability.architecture
    wanted = next((b for prefix, b in _BACKENDS.items() if architecture.startswith(prefix)), "")
    if wanted and wanted not in _backends():
        found = ", ".join(sorted(_backends())) or "none"
        return Verdict.refuse(
            f"the installed triton has no backend {wanted!r} for {architecture}; it has {found}. "
            "Install the triton that your torch was released with"
        )
    return verdict


def judge_fp8(request: Request) -> Verdict:
    """Accept as ``judge`` does, and where triton converts to the 8-bit float that is asked for.

    It is the dim ``out_dtype`` or ``cache_dtype``, or else the request's dtype.

    Source: ``supported_fp8_dtypes`` of the backends of triton 3.7.1. That of nvidia has
    float8_e4m3fn from sm_89 on, and none of the formats without infinities and negative zero
    (fnuz). That of amd converts to all of them, in software where the hardware has others; fnuz
    is taken only on gfx942, whose own formats these are.
    """
    if INTERPRETER in request.capability.features:
        return judge(request)
    named = [request.dims[name] for name in ("out_dtype", "cache_dtype") if name in request.dims]
    dtype = str(named[0]) if named else request.dtype
    architecture = request.capability.architecture
    if dtype == "float8_e4m3fn" and (_compute_capability(architecture) or 89) < 89:
        return Verdict.refuse(f"triton has no {dtype} on {architecture}; it needs sm_89 or newer")
    return _judge_fnuz(request, dtype)


def judge_operands(request: Request) -> Verdict:
    """Accept as ``judge`` does, and where both 8-bit operands of a product can be multiplied.

    Formats that the hardware lacks are converted bit by bit, but for those without infinities and
    negative zero (fnuz), which are taken only on gfx942: the interpreter of triton 3.7.1 has no
    masked loads of them.
    """
    return _judge_fnuz(
        request, *(str(request.dims.get(n, "")) for n in ("x_dtype", "weight_dtype"))
    )


def judge_integers(request: Request) -> Verdict:
    """Accept as ``judge`` does, and where integers can be multiplied.

    For GPUs of NVIDIA older than sm_80 triton 3.7.1 has no matrix instructions. It multiplies
    floats without them, and fails on int8 in its pass TritonGPUAccelerateMatmul.
    """
    architecture = request.capability.architecture
    if (_compute_capability(architecture) or 80) < 80:
        return Verdict.refuse(
            f"triton multiplies integers on sm_80 and newer, the device is {architecture}"
        )
    return judge(request)


def judge_split(request: Request) -> Verdict:
    """Accept as ``judge_operands`` does, where sums of few rows are split among programs.

    The reason of an acceptance says of how many rows.
    """
    architecture = request.capability.architecture
    if INTERPRETER not in request.capability.features and architecture not in _SPLITTING:
        return Verdict.refuse(
            f"splits sums of few rows on {', '.join(_SPLITTING)}, the device is {architecture}"
        )
    verdict = judge_operands(request)
    reason = f"splits sums of up to {MOST_SPLIT_ROWS} rows; more are multiplied as without it"
    return Verdict.accept(reason) if verdict else verdict


@cache
def judge_package() -> Verdict:
    """Accept where the package triton is installed and new enough."""
    if not _folder():
        return Verdict.refuse(f"needs the package triton, which is not installed: {_INSTALL}")
    found = _version()
    if not found:
        return Verdict.accept()  # built from source, of a version that only itself knows
    parts = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    if parts < LEAST_VERSION:
        least = ".".join(map(str, LEAST_VERSION))
        return Verdict.refuse(f"needs triton {least} or newer, found {found}: {_INSTALL}")
    return Verdict.accept()


def _judge_fnuz(request: Request, *dtypes: str) -> Verdict:
    """Accept as ``judge`` does, formats without negative zero (fnuz) on gfx942 only."""
    architecture = request.capability.architecture
    for dtype in dtypes:
        if dtype.endswith("fnuz") and architecture != "gfx942":
            return Verdict.refuse(f"takes {dtype} on gfx942 only, the device is {architecture}")
    return judge(request)


def _compute_capability(architecture: str) -> int | None:
    """Return 90 of sm_90a, None for what is no GPU of NVIDIA."""
    number = architecture.removeprefix("sm_").rstrip("af")
    return int(number) if number.isdecimal() else None


def _folder() -> Path | None:
    """Return where triton is installed; a mere folder of that name on the path does not count."""
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
    """Return the names of all backends: those in triton's own folder, and those beside it."""
    folder = _folder()
    inside = folder.glob("backends/*/compiler.py") if folder else ()
    beside = {point.name for point in entry_points(group="triton.backends")}
    return frozenset({path.parent.name for path in inside} | beside)
