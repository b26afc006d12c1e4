"""Compile the kernels ahead of time for absent GPUs and report the resources of the binaries.

``make triton-targets`` writes the table. A kernel that compiles may still have races, be slow, or
compute wrong numbers on the hardware.
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
    """A GPU architecture to compile kernels for.

    Attributes:
        architecture: name in capabilities and launch parameters.
        shared_bytes: maximum shared memory of one program.
        gpu: triton's description of the target.
    """

    architecture: str
    shared_bytes: int
    gpu: GPUTarget

    @property
    def has_matrix(self) -> bool:
        """True if triton compiles matrix instructions for the target.

        Below sm_80 triton has no matrix instructions of any dtype, although the hardware has
        ``mma.sync.m16n8k8``. There, triton multiplies element by element and fails on integers (the
        pass TritonGPUAccelerateMatmul of 3.7.1 reports integer operands as deprecated).
        """
        return self.gpu.backend != "cuda" or int(self.gpu.arch) >= 80


# Shared memory per block: CUDA C++ Programming Guide, table of technical specifications, 64 KiB,
# 163 KiB, 227 KiB, and 99 KiB for GPUs made for graphics.
# LDS per workgroup: AMD CDNA 1 to CDNA 3, RDNA 3 and RDNA 4 ISA guides, 64 KiB; CDNA 4, 160 KiB.
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
    """One intercepted kernel launch."""

    kernel: JITFunction[Any]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """The resources of one compiled launch.

    Attributes:
        kernel: kernel of the build.
        label: label of the build.
        architecture: architecture of the target.
        name: name of the compiled triton function.
        num_warps: warps per program.
        registers: registers per thread; on AMD, vector registers including accumulation registers.
        spilled: spilled registers (AMD) or bytes of local memory (NVIDIA).
        shared_bytes: shared memory of one program.
        matrix: kinds of matrix instructions in the binary.
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
    """Record the kernel launches that ``function`` does for ``arguments`` on the meta device."""
    recorded: list[Launch] = []

    def record(
        self: JITFunction[Any], *kernel_arguments: Any, grid: Any, warmup: bool, **options: Any
    ) -> None:
        recorded.append(Launch(self, kernel_arguments, options))

    with patch.object(JITFunction, "run", record):
        function(*arguments)
    return recorded


def compile_launch(launch: Launch, target: GPUTarget) -> Any:
    """Compile the kernel as triton would for this launch on ``target``."""
    kernel, options = launch.kernel, dict(launch.options)
    backend = make_backend(target)
    options["debug"] = False
    # The steps of JITFunction.run, for ``target`` instead of the target that the driver reports.
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound_arguments, specialization, extra_options = bind(*launch.arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(
        backend, options, bound_arguments, specialization, extra_options
    )
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=target, options=parsed.__dict__)


def reports(build: Build, target: Target) -> Iterator[Report]:
    """Compile every launch of ``build`` for ``target`` and report the resources."""
    function = load_target(_targets()[build.kernel])
    with assumed(target.architecture):
        recorded = launches(function, *build.arguments())
    for launch in recorded:
        result = compile_launch(launch, target.gpu)
        inspect = _inspect_cubin if target.gpu.backend == "cuda" else _inspect_amdgcn
        registers, spilled, matrix = inspect(result.asm)
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
    """Compile ``build`` for every target except ``build.without``, in a temporary cache."""
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        # Line info contains the path of the source: ``code_bytes`` would depend on the machine.
        with triton.knobs.compilation.scope():
            triton.knobs.compilation.disable_line_info = True
            return [
                report
                for target in targets
                if target.architecture not in build.without
                for report in reports(build, target)
            ]


def all_reports() -> list[Report]:
    """Compile all builds on all CPU cores; takes minutes."""
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        batches = pool.map(_reports_at, range(len(BUILDS)))
        return [report for batch in batches for report in batch]


def _reports_at(number: int) -> list[Report]:
    # By number: a build holds a closure, which cannot be pickled for another process.
    return build_reports(BUILDS[number])


def table(all_builds: Iterable[Report]) -> str:
    """Format reports as a Markdown page with one table per kernel."""
    lines = [
        "# Resources of the compiled Triton kernels",
        "",
        f"These kernels were compiled with triton {triton.__version__} and not executed, so",
        "the tables say nothing about races, speed or numerics. Registers and spills are per",
        "thread, shared memory is per program. `make triton-targets` generates the page.",
    ]
    for kernel, kernel_reports in groupby(all_builds, key=lambda report: report.kernel):
        lines += ["", f"## {kernel}", "", *_HEAD, *map(_line, kernel_reports)]
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


def _inspect_cubin(asm: Mapping[str, Any]) -> tuple[int, int, tuple[str, ...]]:
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


def _inspect_amdgcn(asm: Mapping[str, Any]) -> tuple[int, int, tuple[str, ...]]:
    """Return vector registers, spills of either kind and matrix instructions of an assembly."""
    text = asm["amdgcn"]

    def field(name: str) -> int:
        return sum(int(value) for value in re.findall(rf"\.{name}:\s+(\d+)", text)[:1])

    matrix = set(re.findall(r"\b(v_(?:mfma|wmma|smfmac)\w*)", text))
    spilled = field("vgpr_spill_count") + field("sgpr_spill_count")
    return field("vgpr_count"), spilled + field("private_segment_fixed_size"), tuple(sorted(matrix))


def main() -> None:
    """Compile all builds, and write the table of their resources to the file in ``--write``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, required=True, help="file to write the table to")
    parser.parse_args().write.write_text(table(all_reports()), encoding="utf-8")


if __name__ == "__main__":
    main()
