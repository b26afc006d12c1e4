"""Program that compiles every build of the Triton kernels to SPIR-V with triton-xpu.

    PYTHONPATH=FOLDER python platforms/xpu/tests/spirv_builds.py [KERNEL ...]

prints a JSON object per build: kernel, label, and of each launch its name, bytes of SPIR-V, local
memory and use of matrix instructions; or the reason that the build failed. FOLDER holds
triton-xpu, which is imported as triton. No GPU, SYCL or driver is needed.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

import triton
from triton.backends import backends
from triton.backends.compiler import BaseBackend, GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from interposer.records import load_target
from interposer_ops.triton import BUILDS, Build, assumed, triton_kernels

# What triton's driver says of a stack of a Max 1550, which has what the others have.
DEVICE = {
    "name": "Intel(R) Data Center GPU Max 1550",
    "platform_name": "Intel(R) Level-Zero",
    "vendor": "Intel(R) Corporation",
    "version": "1.6",
    "architecture": 0,
    "gpu_eu_count": 512,
    "gpu_subslice_count": 64,
    "max_work_group_size": 1024,
    "max_num_sub_groups": 64,
    "sub_group_sizes": [16, 32],
    "has_fp64": True,
    "has_subgroup_matrix_multiply_accumulate": True,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": True,
    "has_subgroup_2d_block_io": True,
    "has_bfloat16_conversions": True,
}
TARGET = GPUTarget("xpu", DEVICE, 32)
MAGIC = b"\x03\x02\x23\x07"
MATRIX = re.compile("SubgroupMatrixMultiplyAccumulate|sub_group_\\w*matrix_mad")


def without_sycl(self: Any, target: GPUTarget) -> None:
    """Take the properties as they are; the backend compiles a program of SYCL to ask for them."""
    BaseBackend.__init__(self, target)
    self.device_arch = ""
    self.properties = self.parse_target(target.arch)
    self.binary_ext = "spv"


def launches(build: Build) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Return the kernels that a call would launch, with arguments and options."""
    found: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def record(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append((self, given, options))

    targets = {r.name: r.target for r in triton_kernels()}
    with patch.object(JITFunction, "run", record), assumed("xpu"):
        load_target(targets[build.kernel])(*build.arguments())
    return found


def compiled(kernel: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Return the kernel that triton compiles for a launch: its ``run``, without a driver."""
    backend = make_backend(TARGET)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*given, **{**options, "debug": False})
    parsed = backend.parse_options(rest)
    names, values = [p.name for p in kernel.params], list(bound.values())
    kinds = [kind for kind, _ in specialization]
    signature = dict(zip(names, kinds, strict=True))
    constants = {(i,): value for i, value in enumerate(values) if kinds[i] == "constexpr"}
    attributes = {
        (i,): backend.parse_attr(own)
        for i, (_, own) in enumerate(specialization)
        if isinstance(own, str)
    }
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=TARGET, options=parsed.__dict__)


def reports(build: Build) -> Iterator[dict[str, Any]]:
    """Yield the name, sizes and use of matrix instructions of every launch of a build."""
    for kernel, given, options in launches(build):
        result = compiled(kernel, given, options)
        code = result.asm["spv"]
        yield {
            "name": result.metadata.name,
            "bytes": len(code) if code.startswith(MAGIC) else 0,
            "shared": result.metadata.shared,
            "matrix": bool(MATRIX.search(str(result.asm["llir"]))),
        }


def innermost(error: BaseException) -> str:
    """Return the error of a compiler, behind the calls that led to it."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"


def main(kernels: list[str]) -> None:
    backend = backends["intel"].compiler
    for build in BUILDS:
        if kernels and build.kernel not in kernels:
            continue
        said: dict[str, Any] = {"kernel": build.kernel, "label": build.label}
        with (
            tempfile.TemporaryDirectory() as folder,
            patch.object(backend, "__init__", without_sycl),
            patch.dict("os.environ", {"TRITON_CACHE_DIR": folder}),
        ):
            try:
                said["launches"] = list(reports(build))
            except Exception as error:  # noqa: BLE001 - whatever a compiler raises is the finding
                said["fault"] = innermost(error)
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
