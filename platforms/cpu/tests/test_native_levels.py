"""Every native kernel at every level of every architecture, against golden vectors, without torch.

Other architectures than this machine's are built by cross compilers and run in an emulator, which
says nothing about speed.
"""

from __future__ import annotations

import fcntl
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from interposer import Kernel
from interposer_cpu import native
from interposer_cpu._platform import CPUPlatform
from interposer_cpu.native import BESIDE, LEVELS, NEEDS, levels_of
from interposer_cpu.plugin import interposer_records

# One worker builds, so that the others need not.
pytestmark = [
    pytest.mark.process,
    pytest.mark.xdist_group("native levels"),
    pytest.mark.timeout(1800),
]

NATIVE = Path(__file__).parents[1] / "native"
WRITER = Path(__file__).parent / "golden" / "golden_vectors.py"
PACKAGES = "on Debian: cmake g++ g++-aarch64-linux-gnu g++-s390x-linux-gnu qemu-user"
# Ops without golden vectors: ``linear`` and ``rotary_embedding`` cover the inner loops.
UNCOVERED = {"batched_linear", "rotary_embedding_interleaved"}
HERE = platform.machine()
SANITIZED = (
    "-DINTERPOSER_EMULATED_TILES=ON",
    "-DCMAKE_BUILD_TYPE=None",
    "-DCMAKE_CXX_FLAGS=-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all",
)

LEVELS_OF = {architecture: tuple(levels) for architecture, levels in NEEDS.items()}
# Levels that are left out where the compiler is too old.
NEWER = {"avx2_vnni", "amx"}
# Models of processors that the emulators know: what was picked, and the best level there.
EMULATED = [
    ("x86_64", "Nehalem", "none"),
    ("x86_64", "Haswell", "avx2"),
    ("aarch64", "cortex-a72", "neon"),
    ("aarch64", "a64fx", "neon"),
    ("aarch64", "neoverse-n1", "dotprod"),
    ("aarch64", "max", "bf16_i8mm"),
    ("s390x", "max", "z15"),
]

# Instructions that a family's kernels are compiled for, as mnemonic and operands.
USES = {
    ("linear", "avx2"): ["vfmadd...ps .*%ymm", "vpmaddwd .*%ymm", "vcvtph2ps"],
    ("linear", "avx2_vnni"): ["vfmadd...ps .*%ymm", r"\{vex\} vpdpbusd .*%ymm", "vcvtph2ps"],
    ("linear", "avx512"): ["vfmadd...ps .*%zmm", "vpmaddwd .*%zmm", "vpermps .*%zmm"],
    ("linear", "avx512_vnni"): ["vfmadd...ps .*%zmm", "vpdpbusd .*%zmm"],
    ("linear", "avx512_bf16"): ["vdpbf16ps .*%zmm", "vpdpbusd .*%zmm", "vcvtneps2bf16 .*%zmm"],
    ("linear", "amx"): [
        "tdpbf16ps %tmm",
        "tdpbsud %tmm",
        "tileloadd",
        "tilestored",
        "tilezero",
        "ldtilecfg",
        "tilerelease",
        "vdpbf16ps .*%zmm",
        "vpdpbusd .*%zmm",
    ],
    ("attention", "avx2"): ["vfmadd...ps .*%ymm"],
    ("attention", "avx2_vnni"): [r"\{vex\} vpdpbusd .*%ymm"],
    ("attention", "avx512"): ["vfmadd...ps .*%zmm"],
    ("attention", "avx512_vnni"): ["vpdpbusd .*%zmm"],
    ("attention", "avx512_bf16"): ["vdpbf16ps .*%zmm", "vpdpbusd .*%zmm"],
    ("attention", "neon"): [r"fmla .*\.4s"],
    ("attention", "dotprod"): [r"sdot .*\.16b"],
    ("attention", "bf16_i8mm"): ["bfmmla", "smmla", r"bfdot .*2h\["],
    ("attention", "z14"): ["vfmasb"],
    ("dense", "avx2"): ["vfmadd...ps .*%ymm"],
    ("dense", "avx512"): ["vfmadd...ps .*%zmm"],
    ("dense", "avx512_bf16"): ["vdpbf16ps .*%zmm", "vcvtne2ps2bf16 .*%zmm"],
    ("dense", "neon"): [r"fmla .*\.4s"],
    ("dense", "bf16_i8mm"): ["bfmmla", "bfdot", "bfcvtn"],
    ("dense", "z14"): ["vfmasb"],
    ("experts", "avx2"): ["vfmadd...ps .*%ymm", "vcvtps2ph .*%ymm"],
    ("experts", "avx512"): ["vfmadd...ps .*%zmm", "vcvtps2ph .*%zmm"],
    ("experts", "avx512_bf16"): ["vfmadd...ps .*%zmm", "vcvtneps2bf16 .*%zmm"],
    ("experts", "neon"): [r"fmla .*\.4s", r"fcvtn .*\.4h"],
    ("experts", "bf16_i8mm"): [r"fmla .*\.4s", "bfcvtn"],
    ("experts", "z14"): ["vfmasb"],
    ("lora", "avx2"): ["vfmadd...ps .*%ymm", "vcvtps2ph .*%ymm"],
    ("lora", "avx512"): ["vfmadd...ps .*%zmm", "vcvtps2ph .*%zmm"],
    ("lora", "avx512_bf16"): ["vfmadd...ps .*%zmm", "vcvtneps2bf16 .*%zmm"],
    ("lora", "neon"): [r"fmla .*\.4s", r"fcvtn .*\.4h"],
    ("lora", "bf16_i8mm"): [r"fmla .*\.4s", "bfcvtn"],
    ("lora", "z14"): ["vfmasb"],
    ("recurrence", "avx2"): ["vfmadd...ps .*%ymm", "vcvtps2ph .*%ymm"],
    ("recurrence", "avx512"): ["vfmadd...ps .*%zmm", "vcvtps2ph .*%zmm"],
    ("recurrence", "avx512_bf16"): ["vfmadd...ps .*%zmm", "vcvtneps2bf16 .*%zmm"],
    ("recurrence", "neon"): [r"fmla .*\.4s", r"fcvtn .*\.4h"],
    ("recurrence", "bf16_i8mm"): [r"fmla .*\.4s", "bfcvtn"],
    ("recurrence", "z14"): ["vfmasb"],
    ("sampling", "avx2"): ["vfmadd...ps .*%ymm", "vcvtph2ps .*%ymm", "vpmuludq .*%ymm"],
    ("sampling", "avx512"): ["vfmadd...ps .*%zmm", "vcvtph2ps .*%zmm", "vpmullq .*%zmm"],
    ("sampling", "neon"): [r"fmla .*\.4s", r"fcvtl .*\.4s"],
    ("sampling", "z14"): ["vfmasb"],
    ("linear", "neon"): [r"fmla .*\.4s", r"scvtf .*\.4s"],
    ("linear", "dotprod"): [r"fmla .*\.4s", r"sdot .*\.16b"],
    ("linear", "bf16_i8mm"): ["bfdot", "usdot", "bfmmla", "usmmla", "bfcvtn"],
    ("linear", "z14"): ["vfmasb"],
    ("linear", "z15"): ["vfmasb", "vcefb"],
}

# Instructions of extensions, by what brought them. None may occur below its level.
_AVX = r"v(?!err|erw|m)\w+ .*%[xy]mm"
_VNNI = r"(\{vex\} )?vpdp(busds?|wssds?) "
_BF16 = r"(vdpbf16ps|vcvtne\w*bf16) "
_AVX512_LATER = (
    r"vpdpb(ss|su|uu)d|vpmadd52|vpermb |vperm[it]2b|vpopcnt|vpsh[lr]dv?[wdq] |vpmultishift|gf2p8|"
    r"vaes|vpclmul|v(pcompress|pexpand)[bw] |vpshufbitqmb|vcvtph2psx|"
    r"v(add|sub|mul|div|max|min|sqrt|mov|fn?m(add|sub)\d+)[ps]h "
)
_TILES = r"tdp|tile|ldtile|sttile"
_TILES_LATER = r"tdpfp16|tdp[bh]f8|tcmm|tmmult|tileloaddrs|tcvtrow|tilemov"
_DOT = r"[su]dot "
_MATRICES = r"(usdot|sudot|[su]mmla|usmmla|bfdot|bfmmla|bfmlal[bt]|bfcvtn?2?) "
# Every processor with dot products has these.
_ARM_8_1 = r"(cas|swp|ld(add|set|clr|eor|[su]m(ax|in)))a?l?[bh]? |sqrdml[as]h "
_ARM_LATER = r".*\bz\d+\.|f(?!cvt)\w+ .*\.[48]h|ldap|fcmla|fcadd|fmlal|sm3|sm4|sha512"
_VXE2 = (
    r"(vl|vst)(e?br|er)[hfgq] |vllebrz|vlbrrep|vs[lr]d |vstrs|vcl?efb|vcl?feb|sel(g|fh)?r|"
    r"(n[cnox]|oc)g?rk "
)
_Z_LATER = r"vclfn|vcrnf|vcfn|vcnf|vblend|veval|vgem|vd[lr]?[gq] |vr[lq] "
LACKS = {
    "avx2": [_VNNI, _BF16, _AVX512_LATER, _TILES, ".*%(zmm|k[0-7])"],
    "avx2_vnni": [_BF16, _AVX512_LATER, _TILES, ".*%(zmm|k[0-7])"],
    "avx512": [_VNNI, _BF16, _AVX512_LATER, _TILES],
    "avx512_vnni": [_BF16, _AVX512_LATER, _TILES],
    "avx512_bf16": [_AVX512_LATER, _TILES],
    "amx": [_AVX512_LATER, _TILES_LATER],
    "neon": [_DOT, _MATRICES, _ARM_8_1, _ARM_LATER],
    "dotprod": [_MATRICES, _ARM_LATER],
    "bf16_i8mm": [_ARM_LATER],
    "z14": [_VXE2, _Z_LATER],
    "z15": [_Z_LATER],
}
# What is compiled once, and runs before a level is known.
BASELINE = {
    "x86_64": [_AVX],
    "aarch64": LACKS["neon"],
    "s390x": ["v"],
}


@dataclass(frozen=True)
class Instruction:
    code: bytes
    text: str


@dataclass(frozen=True)
class Built:
    """The test program of one architecture, with its object files."""

    folder: Path
    architecture: str
    tools: str

    def run(
        self, *options: str, model: str = "", program: str = "kernel_tests"
    ) -> subprocess.CompletedProcess[str]:
        """Run a program here, or in an emulator on a processor of a ``model``."""
        emulator = [needed(f"qemu-{self.architecture}"), "-cpu", model] if model else []
        command = [*emulator, str(self.folder / program), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def families(self, level: str) -> list[str]:
        folders = (self.folder / "CMakeFiles").glob(f"*_{level}.dir")
        # One level's name may end in another's.
        names = {f.name.removesuffix(f"_{level}.dir") for f in folders}
        return sorted(name for name in names if (NATIVE / name / "level.cpp").is_file())

    def instructions(self, target: str) -> list[Instruction]:
        """Disassemble all objects of one target."""
        objdump = needed(f"{self.tools}objdump")
        code_lines = []
        for file in sorted((self.folder / f"CMakeFiles/{target}.dir").rglob("*.o")):
            command = [objdump, "--disassemble", "--wide", str(file)]
            listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            for line in listing.splitlines():
                address, *parts = line.split("\t")
                if parts[1:] and address.endswith(":"):
                    code = bytes.fromhex(parts[0].replace(" ", ""))
                    code_lines.append(
                        Instruction(code, " ".join(" ".join(parts[1:]).split()) + " ")
                    )
        assert code_lines, f"{target} holds no code"
        return code_lines


Build = Callable[..., Built]


def needed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"needs {program} ({PACKAGES})")
    return path


@pytest.fixture(scope="session")
def build(request: pytest.FixtureRequest) -> Build:
    """Return a function that builds the program and reuses objects of earlier runs."""
    cache = request.config.cache
    assert cache is not None
    known = dict[tuple[str, ...], Built]()

    def built(architecture: str = HERE, *options: str) -> Built:
        key = (architecture, *options)
        if key not in known:
            kind = "-sanitized" if options else ""
            known[key] = _build(cache.mkdir(f"kernel-tests-{architecture}{kind}"), *key)
        return known[key]

    return built


def _build(folder: Path, architecture: str, *options: str) -> Built:
    cmake, tools = needed("cmake"), ""
    needed("c++")
    switches = ["-DINTERPOSER_PYTHON=OFF", "-DINTERPOSER_TESTS=ON", *options]
    if architecture != HERE:
        tools = f"{architecture}-linux-gnu-"
        toolchain = NATIVE / "toolchains" / f"{tools[:-1]}.cmake"
        if not toolchain.is_file():
            pytest.skip(f"needs a machine of {architecture}: there is no toolchain file for it")
        needed(f"{tools}g++")
        switches.append(f"-DCMAKE_TOOLCHAIN_FILE={toolchain}")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _succeed(cmake, "-S", str(NATIVE), "-B", str(folder), *switches)
        _succeed(cmake, "--build", str(folder), "--parallel", "2")
    return Built(folder, architecture, tools)


def _succeed(*command: str) -> None:
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-4000:] + process.stderr[-4000:]


@pytest.fixture(scope="session")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("golden") / "golden.bin"
    _succeed(sys.executable, str(WRITER), str(path))
    return path


def cases_by_level(process: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """Collect the passed cases by level.

    Raises: AssertionError: a case failed, or none was run.
    """
    lines = process.stdout.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "    "))]
    assert process.returncode == 0, "\n".join([*failures[:20], process.stderr[-2000:]])
    grouped = dict[str, list[str]]()
    for line in lines:
        state, _, rest = line.partition(" ")
        if state == "ok":
            level, _, case = rest.partition(" ")
            grouped.setdefault(level, []).append(case)
    return grouped


def levels_until(architecture: str, best: str) -> tuple[str, ...]:
    levels = LEVELS_OF[architecture]
    until = levels[: levels.index(best) + 1] if best != "none" else ()
    return tuple(level for level in until if level == best or level not in BESIDE)


def levels_here(built: Built) -> tuple[str, ...]:
    """List the levels that both the compiler and this processor support."""
    levels = levels_of(CPUPlatform().capability("cpu"))
    return tuple(level for level in levels if built.families(level))


def check_all_levels(built: Built, golden: Path, levels: tuple[str, ...], model: str = "") -> None:
    best = levels[-1] if levels else "none"
    # Emulators of processes keep half a megabyte of every thread that ended, and every case starts
    # several. How work is shared among them is the same code everywhere, and tested here.
    threads = "1" if model else "3"
    options = ["--best", best, "--threads", threads, str(golden)]
    passed = cases_by_level(built.run(*options, model=model))
    assert tuple(passed) == levels
    for cases in passed.values():
        ops = {case.partition(":")[0] for case in cases}
        assert len(cases) == struct.unpack_from("<I", golden.read_bytes(), 20)[0]
        assert ops >= {"linear", "w4a16_linear", "int8_linear", "fp8_linear"}


def test_python_and_the_library_name_the_same_levels() -> None:
    assert [name for names in LEVELS_OF.values() for name in names] == list(LEVELS.values())


def test_every_kernel_has_golden_vectors() -> None:
    covered = set(re.findall(r"\bCovered\(\s*(\w+)", WRITER.read_text(encoding="utf-8")))
    ops = {
        record.op
        for record in interposer_records()
        if isinstance(record, Kernel) and record.name.endswith("_native")
    }
    assert ops - covered == UNCOVERED


@pytest.mark.native
@pytest.mark.slow
def test_kernels_are_correct_at_every_level_of_this_processor(build: Build, golden: Path) -> None:
    built = build()
    check_all_levels(built, golden, levels_here(built))


@pytest.mark.native
@pytest.mark.slow
def test_the_test_program_detects_wrong_results_and_levels(
    build: Build, golden: Path, tmp_path: Path
) -> None:
    content = bytearray(golden.read_bytes())
    # Behind the dtype of a result stands how many numbers are expected, then these. Behind that of
    # an argument stands something else, which is no such number; the last results may be empty.
    name = b"\x08\x00\x00\x00bfloat16"
    ends = [hit.end() for hit in re.finditer(name, content)]
    counts = {end: struct.unpack_from("<q", content, end)[0] for end in ends}
    at = max(end for end, count in counts.items() if 0 < count < 2**20) + 8
    content[at : at + 8] = struct.pack("<d", 1e9)
    changed, cut = tmp_path / "changed.bin", tmp_path / "cut.bin"
    changed.write_bytes(content)
    cut.write_bytes(content[:-1])
    built = build()
    process = built.run("--only", "w8a16_embedding", str(changed))
    num_levels = len(set(re.findall(r"^ok (\w+)", process.stdout, re.MULTILINE)))
    assert process.returncode == 1
    assert (
        process.stdout.count("FAILED") == process.stdout.count("1e+09 expected") == num_levels > 0
    )
    assert built.run(str(cut)).returncode == 2
    assert built.run("--best", "another", str(golden)).returncode == 1


@pytest.mark.foreign
@pytest.mark.parametrize(("architecture", "model", "best"), EMULATED)
def test_kernels_are_correct_in_an_emulator(
    architecture: str, model: str, best: str, build: Build, golden: Path
) -> None:
    check_all_levels(build(architecture), golden, levels_until(architecture, best), model)


def check_instructions(built: Built, level: str) -> None:
    families = built.families(level)
    if not families and level in NEWER:
        pytest.skip(f"needs a compiler that knows the instructions of {level}")
    assert set(families) >= {family for family, named in USES if named == level}
    for family in families:
        instructions = built.instructions(f"{family}_{level}")
        texts = {instruction.text for instruction in instructions}
        for pattern in USES.get((family, level), []):
            assert any(re.match(pattern, text) for text in texts), f"{family}: no {pattern}"
        refused = "|".join(LACKS[level])
        offending = sorted({text for text in texts if re.match(refused, text)})
        if level in (
            "avx2",
            "avx2_vnni",
        ):  # this byte begins what AVX-512 brought, and nothing else
            offending += [i.text for i in instructions if i.code[0] == 0x62]
        assert not offending, f"{family} at {level}: {offending[:5]}"


def check_baseline(built: Built) -> None:
    refused = "|".join(BASELINE[built.architecture])
    texts = {instruction.text for instruction in built.instructions("kernels")}
    offending = sorted(text for text in texts if re.match(refused, text))
    assert not offending, offending[:5]


@pytest.mark.native
@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS_OF.get(HERE, ()))
def test_objects_contain_the_instructions_of_their_level(level: str, build: Build) -> None:
    check_instructions(build(), level)


@pytest.mark.native
@pytest.mark.slow
def test_code_that_selects_a_level_uses_baseline_instructions(build: Build) -> None:
    check_baseline(build())


@pytest.mark.foreign
@pytest.mark.parametrize(
    ("architecture", "level"),
    [(architecture, level) for architecture in ("aarch64", "s390x")
     for level in LEVELS_OF[architecture]],
)  # fmt: skip
def test_cross_compiled_objects_contain_the_instructions_of_their_level(
    architecture: str, level: str, build: Build
) -> None:
    check_instructions(build(architecture), level)


@pytest.mark.foreign
@pytest.mark.parametrize("architecture", ["aarch64", "s390x"])
def test_cross_compiled_level_selection_uses_baseline_instructions(
    architecture: str, build: Build
) -> None:
    check_baseline(build(architecture))


@pytest.mark.native
@pytest.mark.slow
def test_sanitizers_find_no_error_also_with_emulated_tiles(build: Build, golden: Path) -> None:
    built = build(HERE, *SANITIZED)
    levels = levels_here(built)
    # What AMX adds is emulated, the rest of that level is not.
    if levels[-1:] == ("avx512_bf16",):
        levels = (*levels, "amx")
    check_all_levels(built, golden, levels)


def check_tiles(built: Built) -> None:
    process = built.run(program="tile_tests")
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.count("ok ") >= 10


def check_matrices(built: Built, model: str = "") -> None:
    process = built.run(program="matrix_tests", model=model)
    assert process.returncode == 0, process.stdout + process.stderr
    of_dtypes = [process.stdout.count(f"ok {dtype}: ") for dtype in ("bfloat16", "int8")]
    # Of three head sizes and six numbers of tokens each, up to eight rows and up to four.
    assert of_dtypes == [8 * 18, 4 * 18]


@pytest.mark.native
@pytest.mark.slow
def test_ranks_get_the_same_bits(build: Build) -> None:
    process = build().run(program="rank_tests")
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.foreign
@pytest.mark.parametrize("architecture", ["aarch64", "s390x"])
def test_ranks_get_the_same_bits_in_an_emulator(architecture: str, build: Build) -> None:
    process = build(architecture).run(program="rank_tests", model="max")
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.foreign
def test_matrix_instructions_equal_dot_products_in_an_emulator(build: Build) -> None:
    built = build("aarch64")
    check_matrices(built, "max")
    assert built.run(program="matrix_tests", model="neoverse-n1").returncode == 2


@pytest.mark.native
@pytest.mark.slow
def test_matrix_instructions_equal_dot_products(build: Build) -> None:
    if "bf16_i8mm" not in native.levels():
        pytest.skip("needs a processor with the level bf16_i8mm")
    check_matrices(build())


@pytest.mark.native
@pytest.mark.slow
def test_emulated_tiles_follow_the_documentation(build: Build) -> None:
    if "avx512_bf16" not in native.levels():
        pytest.skip("needs a processor with the level avx512_bf16")
    check_tiles(build(HERE, *SANITIZED))


@pytest.mark.native
@pytest.mark.slow
def test_tiles_follow_the_documentation(build: Build) -> None:
    if "amx" not in native.levels():
        pytest.skip("needs a processor with the level amx")
    check_tiles(build())
