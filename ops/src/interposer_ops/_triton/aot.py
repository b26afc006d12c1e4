"""Compiling the kernels for GPUs that are not there, and reading what came out.

``make triton-targets`` writes the table. That a kernel compiles says nothing about races, the
numerics of the hardware or speed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from interposer.records import load_target
from interposer_ops._records import triton_kernels
from interposer_ops._triton.build import Build
from interposer_ops._triton.builds import BUILDS
from interposer_ops._triton.parameters import assumed


@dataclass(frozen=True)
class Target:
    """A GPU to compile for.

    Attributes:
        architecture: as capabilities and launch parameters name it.
        shared_bytes: the shared memory that one program may have.
        gpu: as triton names it.
    """

    architecture: str
    shared_bytes: int
    gpu: GPUTarget

    @property
    def has_matrix(self) -> bool:
        """True if triton has matrix instructions for it.

        Before sm_80 it has none of any dtype, though the hardware has ``mma.sync.m16n8k8``: it
        multiplies element by element, and fails on integers (the pass TritonGPUAccelerateMatmul
        of 3.7.1 says that they were deprecated).
        """
        return self.gpu.backend != "cuda" or int(self.gpu.arch) >= 80


# CUDA C++ Programming Guide, table of technical specifications: for one block 64 KiB, 163 KiB,
# 227 KiB, and 99 KiB of what is made for graphics.
# LDS of one workgroup: AMD CDNA 1 to CDNA 3, RDNA 3 and RDNA 4 ISA guides, 64 KiB; CDNA 4, 160 KiB.
TARGETS = (
    Target("sm_75", 64 * 1024, GPUTarget("cuda", 75, 32)),
    Target("sm_80", 163 * 1024, GPUTarget("cuda", 80, 32)),
    Target("sm_89", 99 * 1024, GPUTarget("cuda", 89, 32)),
    Target("sm_90", 227 * 1024, GPUTarget("cuda", 90, 32)),
    Target("sm_100", 227 * 1024, GPUTarget("cuda", 100, 32)),
    Target("sm_120", 99 * 1024, GPUTarget("cuda", 120, 32)),
    Target("gfx908", 64 * 1024, GPUTarget("hip", "gfx908", 64)),
    Target("gfx90a", 64 * 1024, GPUTarget("hip", "gfx90a", 64)),
    Target("gfx942", 64 * 1024, GPUTarget("hip", "gfx942", 64)),
    Target("gfx950", 160 * 1024, GPUTarget("hip", "gfx950", 64)),
    Target("gfx1100", 64 * 1024, GPUTarget("hip", "gfx1100", 32)),
    Target("gfx1201", 64 * 1024, GPUTarget("hip", "gfx1201", 32)),
)


@dataclass(frozen=True)
class Launch:
    """A kernel that was about to be launched."""

    kernel: JITFunction[Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """The result of compiling one launch.

    Attributes:
        kernel: of the build.
        label: of the build.
        architecture: of the target.
        name: of the function that triton compiled.
        registers: of one thread; those of vectors on AMD, accumulation included.
        spilled: registers that did not fit (AMD), or bytes of local memory (NVIDIA).
        shared_bytes: memory shared by the threads of one program.
        matrix: the kinds of matrix instructions.
        code_bytes: size of the binary.
    """

    kernel: str
    label: str
    architecture: str
    name: str
    num_warps: int
    registers: int
    spilled: int
    shared_bytes: int
    matrix: tuple[str, ...]
    code_bytes: int


def launches(function: Callable[..., Any], *arguments: Any) -> list[Launch]:
    """Return what ``function`` would launch for ``arguments`` on the meta device."""
    found: list[Launch] = []

    def record(
        self: JITFunction[Any], *given: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        found.append(Launch(self, given, options))

    with patch.object(JITFunction, "run", record):
        function(*arguments)
    return found


def compiled(launch: Launch, target: GPUTarget) -> Any:
    """Return the kernel as triton would compile it for this launch."""
    kernel, options = launch.kernel, dict(launch.options)
    backend = make_backend(target)
    options["debug"] = False
    # The steps of JITFunction.run, with the target given instead of asked of a driver.
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(*launch.arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, bound, specialization, rest
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def reports(build: Build, target: Target) -> Iterator[Report]:
    """Compile every launch of ``build`` for ``target`` and report on it."""
    function = load_target(_targets()[build.kernel])
    with assumed(target.architecture):
        found = launches(function, *build.arguments())
    for launch in found:
        result = compiled(launch, target.gpu)
        read = _read_cuda if target.gpu.backend == "cuda" else _read_hip
        registers, spilled, matrix = read(result.asm)
        yield Report(
            build.kernel,
            build.label,
            target.architecture,
            result.metadata.name,
            result.metadata.num_warps,
            registers,
            spilled,
            result.metadata.shared,
            matrix,
            len(result.kernel),
        )


def build_reports(build: Build, targets: Iterable[Target] = TARGETS) -> list[Report]:
    """Compile ``build`` for every target that its kernel takes, into a folder that goes away."""
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        # The binary would hold the path of the source file, and be longer in a deeper folder.
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.disable_line_info = True
            return [
                report
                for target in targets
                if target.architecture not in build.without
                for report in reports(build, target)
            ]


def all_reports() -> list[Report]:
    """Compile all builds on all processors, which takes minutes."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        return [report for found in pool.map(_reports_at, range(len(BUILDS))) for report in found]


def _reports_at(number: int) -> list[Report]:
    return build_reports(BUILDS[number])  # a build itself cannot be sent to another process


def table(found: Iterable[Report]) -> str:
    """Return the figures as Markdown."""
    lines = [
        "# What the Triton kernels compile to",
        "",
        f"Compiled with triton {triton.__version__}, not executed: this says nothing about races,",
        "the numerics of the hardware or speed. Registers and what spills of them are those of one",
        "thread, shared memory is that of one program. Written by `make triton-targets`.",
    ]
    for kernel, own in groupby(found, key=lambda report: report.kernel):
        lines += ["", f"## {kernel}", "", *_HEAD, *map(_line, own)]
    return "\n".join(lines) + "\n"


_HEAD = (
    "| build | target | warps | registers | spilled | shared bytes | matrix instructions | bytes |",
    "|---|---|---|---|---|---|---|---|",
)


def _line(report: Report) -> str:
    cells = (
        report.label,
        report.architecture,
        report.num_warps,
        report.registers,
        report.spilled,
        report.shared_bytes,
        ", ".join(report.matrix) or "none",
        report.code_bytes,
    )
    return f"| {' | '.join(map(str, cells))} |"


def _targets() -> dict[str, str]:
    return {r.name: r.target for r in triton_kernels()}


def _read_cuda(asm: Mapping[str, Any]) -> tuple[int, int, tuple[str, ...]]:
    """Return registers, bytes of local memory and matrix instructions of a cubin."""
    dump = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(asm["cubin"])
        printed = subprocess.run(
            [dump, "--dump-resource-usage", "--dump-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", printed))
    matrix = set(re.findall(r"\b((?:H|I|D|Q|HG|QG|IG|UTCH|UTCQ|UTCI)MMA)\b", printed))
    return int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"]), tuple(sorted(matrix))


def _read_hip(asm: Mapping[str, Any]) -> tuple[int, int, tuple[str, ...]]:
    """Return vector registers, spills of either kind and matrix instructions of an assembly."""
    text = asm["amdgcn"]

    def field(name: str) -> int:
        return sum(int(value) for value in re.findall(rf"\.{name}:\s+(\d+)", text)[:1])

    matrix = set(re.findall(r"\b(v_(?:mfma|wmma|smfmac)\w*)", text))
    spilled = field("vgpr_spill_count") + field("sgpr_spill_count")
    return field("vgpr_count"), spilled + field("private_segment_fixed_size"), tuple(sorted(matrix))


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="file to write the table to")
    parser.parse_args().write.write_text(table(all_reports()), encoding="utf-8")


if __name__ == "__main__":
    main()
