"""A written package passes its own ruff and mypy after edits that its author is likely to make."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from interposer_tools._plugin_template import NewPlugin, PluginKind

SECOND_RECORD = """
        Kernel(
            op="gelu_and_mul",
            name="gelu_and_mul_{package}",
            target="{package}.kernels:gelu_and_mul",
            requires=Requires(
                dtypes=("bfloat16",),
                dims={{"intermediate_size": Dim(at_least=64, multiple_of=16)}},
            ),
        ),
    ]
"""
SECOND_KERNEL = '''

def gelu_and_mul(x: torch.Tensor, approximate: str) -> torch.Tensor:
    """Return the op ``gelu_and_mul``: GELU of a half \N{MULTIPLICATION SIGN} the other."""
    gate, up = x.chunk(2, dim=-1)
    return torch.ops.aten.gelu(gate, approximate=approximate) * up
'''
OWN_OP = '''"""An op of this package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from interposer import Case, CaseGenerator, CaseSampler, Dims, Tolerance, custom_op


def shape_of(dims: Dims) -> tuple[int, int]:
    """Return the rows and columns that a request states."""
    return int(dims.get("rows", 1)), int(dims["hidden_size"])


def cases(dtype: torch.dtype, seed: int) -> Iterator[Case]:
    """Yield arguments of several sizes."""
    known: Mapping[str, Dims] = {"rows": {"rows": 3, "hidden_size": 8}, "one": {"hidden_size": 1}}
    for label, dims in known.items():
        yield Case(label, {"x": torch.ones(shape_of(dims), dtype=dtype)}, dims)


def sample(dtype: torch.dtype, dims: Dims, num_tokens: int, seed: int) -> Case:
    """Draw a step of so many tokens."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, int(dims["hidden_size"]), generator=generator).to(dtype)
    return Case("sample", {"x": x}, dims)


def drawn(sampler: CaseSampler, generate: CaseGenerator, width: int) -> list[Case]:
    """Return a sample of this width, and all cases."""
    return [sampler(torch.float32, {"hidden_size": width}, 4, 0), *generate(torch.float32, 0)]


@custom_op("acme_double", cases=cases, sample=sample, tolerance=Tolerance(roundings=1))
def double(x: torch.Tensor) -> torch.Tensor:
    """Return twice ``x``."""
    compiled = torch.compile(torch.add)
    return compiled(x, x)


everything = drawn(sample, cases, 16)
'''
LEVEL_NAMES = '''

def level_names() -> list[str]:
    """Return the names of the levels of this processor, the highest first."""
    _LIBRARY.level_name.argtypes = [ctypes.c_int]
    return list(reversed(LEVELS))
'''
PREDICATE = '''"""What can be said of a spec without importing the backend."""

from __future__ import annotations

from interposer import AttentionSpec, Capability, Verdict

SIZES = [64, 128]


def judge(spec: AttentionSpec, capability: Capability) -> Verdict:
    """Accept head sizes of the hardware."""
    if spec.head_size not in SIZES:
        return Verdict.refuse(f"head_size is {spec.head_size}, must be one of {SIZES}")
    return spec.judge_plain_decoder()
'''
BITS = """        bits = settings.get("bits", 8)
        if bits != 8:
            raise ConfigError(f"quantization_config.bits is {bits!r}, must be 8")
        return cls(skip)
"""


@dataclass(frozen=True)
class Package:
    """A written package that is edited."""

    folder: Path
    name: str

    def module(self, name: str) -> Path:
        return self.folder / "src" / self.name / f"{name}.py"

    def replace(self, module: str, old: str, new: str) -> None:
        """Replace a text that the module has, everywhere in it."""
        text = self.module(module).read_text()
        assert old in text, (module, old)
        self.module(module).write_text(text.replace(old, new))

    def append(self, module: str, text: str) -> None:
        with self.module(module).open("a") as file:
            file.write(text)


Edit = Callable[[Package], None]


def rename_the_kernel(package: Package) -> None:
    package.replace("kernels", "def silu_and_mul(", "def gated(")
    package.replace("plugin", "kernels:silu_and_mul", "kernels:gated")


def change_dtypes(package: Package) -> None:
    package.replace("plugin", '("float32", "bfloat16")', '("bfloat16",)')


def add_a_second_kernel(package: Package) -> None:
    package.append("kernels", SECOND_KERNEL)
    package.replace("plugin", "import Kernel, ", "import Dim, Kernel, ")
    package.replace("plugin", "\n    ]\n", SECOND_RECORD.format(package=package.name))


def add_an_op(package: Package) -> None:
    package.module("own_ops").write_text(OWN_OP)
    entry = f'OpEntry(name="acme_double", target="{package.name}.own_ops:double")'
    package.replace("plugin", "Kernel, Requires", "Kernel, OpEntry, Requires")
    package.replace("plugin", "    return [\n", f"    return [\n        {entry},\n")


def list_levels(package: Package) -> None:
    package.append("kernels", LEVEL_NAMES)


def rename_the_backend(package: Package) -> None:
    package.replace("backend", "SideBySide", "Interleaved")
    package.replace("plugin", "SideBySide", "Interleaved")


def add_a_predicate(package: Package) -> None:
    package.module("predicate").write_text(PREDICATE)
    line = f'requires=Requires(),\n            predicate="{package.name}.predicate:judge",'
    package.replace("plugin", 'requires=Requires(dtypes=("float32", "bfloat16")),', line)


def change_the_page_sizes(package: Package) -> None:
    package.replace("plugin", "page_sizes=(16, 32)", "page_sizes=(64,)")


def take_a_standard_op(package: Package) -> None:
    """Bind an op of interposer-ops in the place of the package's own."""
    package.module("ops").unlink()
    old_imports = f"from torch import nn\n\nfrom {package.name}.ops import dequantized, linear\n"
    standard = "from interposer_ops.quantized_linear import w8a16_linear\nfrom torch import nn\n"
    package.replace("scheme", old_imports, standard)
    package.replace("scheme", "bind_kernel(linear, ", "bind_kernel(w8a16_linear, group_size=64, ")
    package.replace("scheme", "in linear.constants", "in w8a16_linear.constants")
    weight = "weight.double() * scale.double().unsqueeze(1)"
    package.replace("scheme", "dequantized(weight, scale, torch.float64)", weight)
    package.replace("plugin", "import OpEntry, SchemeEntry", "import SchemeEntry")
    text = package.module("plugin").read_text()
    package.module("plugin").write_text(text[: text.index("        OpEntry(")] + "    ]\n")


def add_a_setting(package: Package) -> None:
    package.replace("scheme", '("quant_method", "skip")', '("bits", "quant_method", "skip")')
    package.replace("scheme", "        return cls(skip)\n", BITS)


def add_a_case(package: Package) -> None:
    package.replace("ops", '    "no rows": (0', '    "two rows": (2, 32, 16),\n    "no rows": (0')


def name_the_op(package: Package) -> None:
    package.replace("ops", f'"{package.name}_linear"', '"squares_linear"')
    package.replace("plugin", f"{package.name}_linear", "squares_linear")


KERNELS = (rename_the_kernel, change_dtypes, add_a_second_kernel, add_an_op)
EDITS: dict[str, tuple[PluginKind, tuple[Edit, ...]]] = {
    "kernel": (PluginKind.KERNEL, KERNELS),
    "native": (PluginKind.KERNEL, (*KERNELS, list_levels)),
    "attention": (
        PluginKind.ATTENTION,
        (rename_the_backend, add_a_predicate, change_the_page_sizes),
    ),
    "quantization": (PluginKind.QUANTIZATION, (add_a_setting, add_a_case, name_the_op)),
    "standard-op": (PluginKind.QUANTIZATION, (add_a_setting, take_a_standard_op)),
}


@pytest.fixture(scope="module")
def edited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return packages that were edited, and formatted with their own settings."""
    folder = tmp_path_factory.mktemp("edited")
    for title, (kind, edits) in EDITS.items():
        name = f"acme-{title}"
        project = NewPlugin(name, kind, native=title == "native").write(folder)
        package = Package(project, name.replace("-", "_"))
        for edit in edits:
            edit(package)
        run("ruff", "format", "--no-cache", "--quiet", cwd=project)
    return {title: folder / f"acme-{title}" for title in EDITS}


def run(*arguments: str | Path, cwd: Path) -> None:
    command = [sys.executable, "-m", *map(str, arguments)]
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.landing(2)
@pytest.mark.process
@pytest.mark.parametrize("title", EDITS)
def test_edited_packages_pass_ruff(title: str, edited: dict[str, Path]) -> None:
    run("ruff", "check", "--no-cache", cwd=edited[title])


@pytest.mark.slow
def test_edited_packages_pass_mypy(edited: dict[str, Path], tmp_path: Path) -> None:
    for folder in edited.values():  # one after the other, as they share what is known of torch
        run("mypy", "--cache-dir", tmp_path, cwd=folder)
