"""Measure the cost of a hundred plugins: in discovery, the import, resolution and a call.

    python benchmarks/discovery.py [--rounds 7] [--check]

A hundred healthy plugins are installed into a temporary folder. Every figure is taken in processes
of its own, with the plugins and without them in turn, so that drift of the machine hits both alike.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import py_compile
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from interposer import (
    AttentionBackend,
    BoundKernel,
    Config,
    CustomOp,
    Resolver,
    Site,
    current_registry,
    place,
)
from interposer.records import Kernel, load_target
from interposer_models.families import Qwen3
from interposer_ops.layers.norm import RMSNorm

COUNT = 100
LAYERS = 28

PLUGIN = """
from interposer.hookspecs import hookimpl
from interposer.records import Kernel, LayerEntry
from interposer.requires import Requires

INTERPOSER_API = ">=1.0,<2"
REQUIRES = Requires(dtypes=("float32", "bfloat16"))
PARTS = "{package}.parts:"


@hookimpl
def interposer_records():
    return [
        Kernel("rms_norm", "rms_norm_{package}", PARTS + "rms_norm", "", REQUIRES, score=1.0),
        Kernel("silu_and_mul", "silu_{package}", PARTS + "silu_and_mul", score=1.0),
        LayerEntry("rms_norm", "norm_{package}", PARTS + "Norm", score=-1.0),
    ]
"""
PARTS = """
import torch
from interposer_ops.layers.norm import RMSNorm


def rms_norm(x, weight, eps):
    return torch.rms_norm(x, weight.shape, weight, eps)


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


class Norm(RMSNorm):
    pass
"""
METADATA = """Metadata-Version: 2.4
Name: {name}
Version: 1.0
Requires-Python: >=3.11
Requires-Dist: interposer<0.2,>=0.1
Requires-Dist: interposer-ops<0.2,>=0.1
Requires-Dist: torch>=2.11
"""
# The time of the processor: this process waits for nobody.
IMPORT = """
import sys, time
start = time.process_time()
import interposer
print((time.process_time() - start) * 1e3)
print(sum(name.startswith("measured_") for name in sys.modules))
"""


@dataclass(frozen=True)
class Figure:
    """One line of the table: values of all rounds, and the most that their median may be."""

    label: str
    values: Sequence[float]
    unit: str
    target: float | None = None
    remark: str = ""

    @property
    def holds(self) -> bool:
        return self.target is None or statistics.median(self.values) <= self.target

    def __str__(self) -> str:
        low, middle, high = quartiles(self.values)
        spread = f"{low:9.3f} to {high:.3f}"
        goal = "" if self.target is None else f"at most {self.target:g} {self.unit}"
        answer = "" if self.target is None else ("holds" if self.holds else "FAILS")
        return (
            f"{self.label:46}{middle:9.3f} {self.unit}  {spread:22}{goal:22}{answer:7}{self.remark}"
        )


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, the median and the third quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def install_plugins(folder: Path, count: int = COUNT) -> None:
    """Write ``count`` distributions with all that an installer leaves behind."""
    for number in range(count):
        name, package = f"measured-{number:03}", f"measured_{number:03}"
        info = f"{package}-1.0.dist-info"
        contents = {
            f"{package}/__init__.py": "",
            f"{package}/plugin.py": PLUGIN.format(package=package),
            f"{package}/parts.py": PARTS,
            f"{info}/INSTALLER": "pip\n",
            f"{info}/METADATA": METADATA.format(name=name),
            f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/entry_points.txt": f"[interposer.plugins]\n{name} = {package}.plugin\n",
        }
        for path, text in contents.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
        rows = [_row(path, text.encode()) for path, text in contents.items()]
        compiled = [
            f"{py_compile.compile(str(folder / path))}".removeprefix(f"{folder}/")
            for path in contents
            if path.endswith(".py")
        ]
        rows += [f"{path},,\n" for path in (*compiled, f"{info}/RECORD")]
        (folder / info / "RECORD").write_text("".join(rows), encoding="utf-8")


def _row(path: str, content: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"{path},sha256={digest},{len(content)}\n"


class Machine:
    """Starts processes in which the plugins are installed, or are not."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._caches = 0
        for name in ("with", "without", "cache"):
            (root / name).mkdir()
        install_plugins(root / "with")

    def run(self, *arguments: str, plugins: bool, cold: bool = False) -> list[str]:
        """Return the lines that a Python process printed."""
        cache = self._root / "cache"
        if cold:
            self._caches += 1
            cache = self._root / f"cold{self._caches}"
        kept = {key: value for key, value in os.environ.items() if "INTERPOSER" not in key}
        variables = {
            "PYTHONPATH": str(self._root / ("with" if plugins else "without")),
            "INTERPOSER_CACHE_DIR": str(cache),
            "INTERPOSER_PLATFORM": "cpu",
        }
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**kept, **variables},
            cwd=self._root,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        return done.stdout.splitlines()

    def measure(self, name: str, *, plugins: bool, cold: bool = False) -> dict[str, Any]:
        """Return the result of this file's measurement ``name``, run in a process of its own."""
        *_, last = self.run(__file__, "--measure", name, plugins=plugins, cold=cold)
        return json.loads(last)  # type: ignore[no-any-return]


def measure_discovery() -> dict[str, Any]:
    """Time the discovery alone: all that it imports was imported before."""
    start = time.perf_counter()
    plugins = current_registry().plugins
    elapsed = (time.perf_counter() - start) * 1e3
    found = [plugin.name for plugin in plugins.loaded if plugin.name.startswith("measured-")]
    return {"ms": elapsed, "found": len(found), "failed": len(plugins.failed)}


class TimedResolver(Resolver):
    """Adds up the seconds that are spent in resolution, nested requests once."""

    seconds = 0.0
    _depth = 0

    def _timed(self, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        self._depth += 1
        try:
            return call()
        finally:
            self._depth -= 1
            if not self._depth:
                self.seconds += time.perf_counter() - start

    def kernel(self, op: CustomOp[Any, Any], *args: Any) -> BoundKernel[Any, Any]:
        return self._timed(lambda: Resolver.kernel(self, op, *args))  # type: ignore[no-any-return]

    def layer(self, *args: Any) -> Any:
        return self._timed(lambda: Resolver.layer(self, *args))

    def attention(self, *args: Any) -> AttentionBackend:
        return self._timed(lambda: Resolver.attention(self, *args))  # type: ignore[no-any-return]


def measure_resolution() -> dict[str, Any]:
    """Time the first resolution of a model in this process, and the next one."""
    from random_model import SHAPES

    settings = {**SHAPES["qwen3-0.6b"]().to_dict(), "architectures": ["Qwen3ForCausalLM"]}
    config = Qwen3.parse(settings, "benchmark")
    assert settings["num_hidden_layers"] == LAYERS
    placement, registry = place(), current_registry()
    trusted = frozenset({placement.choice.chosen.provider})
    rows = []
    for _ in range(2):
        resolver = TimedResolver(registry, placement.device, Config(), trusted=trusted)
        with torch.device("meta"):
            config.build(Site(resolver, "", torch.bfloat16), page_size=16)
        rows.append(resolver.seconds * 1e3)
    requests = sum(len(prefixes) for _, prefixes in resolver.choices.values())
    return {"first": rows[0], "next": rows[1], "requests": requests}


def measure_call(rounds: int = 301, calls: int = 2000) -> dict[str, Any]:
    """Time a kernel called by its own name and as the attribute that a layer has bound."""
    resolver = Resolver(current_registry(), place().device, Config())
    layer = RMSNorm(Site(resolver, "norm", torch.float32), 16, 1e-6)
    (choice,) = (
        c
        for c, _ in resolver.choices.values()
        if c.request.name == "rms_norm" and c.request.kind == "kernel"
    )
    assert isinstance(choice.chosen.record, Kernel)
    function = load_target(choice.chosen.record.target)
    names = {"direct": function, "bound": layer.norm, "x": torch.ones(1, 16), "w": layer.weight}
    timers = [timeit.Timer(f"{name}(x, w, 1e-6)", globals=names) for name in ("direct", "bound")]
    pairs = []
    for number in range(rounds):
        # Whoever goes second finds warmer caches, so the two take turns.
        order = timers if number % 2 else timers[::-1]
        found = {timer: timer.timeit(calls) / calls * 1e9 for timer in order}
        pairs.append([found[timer] for timer in timers])
    return {
        "same": layer.norm is function,
        "direct": [direct for direct, _ in pairs],
        "difference": [bound - direct for direct, bound in pairs],
    }


MEASUREMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "discovery": measure_discovery,
    "resolution": measure_resolution,
    "call": measure_call,
}


def discovery_figures(machine: Machine, rounds: int) -> Iterable[Figure]:
    """Yield the cost of one plugin more, with remembered verdicts and without."""
    cold = []
    for _ in range(max(2, rounds // 3)):
        found = [machine.measure("discovery", plugins=on, cold=True) for on in (True, False)]
        cold.append(_per_plugin(*found))
    # Fills the caches: bytecode, verdicts, and the pages of the disk.
    machine.measure("discovery", plugins=True)
    machine.measure("discovery", plugins=False)
    warm, alone = [], []
    for _ in range(rounds):
        found = [machine.measure("discovery", plugins=on) for on in (True, False)]
        warm.append(_per_plugin(*found))
        alone.append(found[1]["ms"])
    yield Figure("discovery, one plugin, warm", warm, "ms", 1.0)
    yield Figure("discovery, one plugin, cold with examination", cold, "ms")
    yield Figure("discovery without the hundred, warm", alone, "ms")


def _per_plugin(full: dict[str, Any], empty: dict[str, Any]) -> float:
    if (full["found"], empty["found"]) != (COUNT, 0):
        raise SystemExit(f"{full['found']} of {COUNT} plugins were found; failed: {full['failed']}")
    return (full["ms"] - empty["ms"]) / COUNT  # type: ignore[no-any-return]


def import_figures(machine: Machine, rounds: int) -> Iterable[Figure]:
    """Yield the time that plugins add to ``import interposer``, and the number it imports."""
    differences, alone, loaded = [], [], 0
    for number in range(4 * rounds):
        lines = {}
        for plugins in (True, False) if number % 2 else (False, True):
            lines[plugins] = machine.run("-c", IMPORT, plugins=plugins)
        loaded = max(loaded, int(lines[True][1]))
        differences.append(float(lines[True][0]) - float(lines[False][0]))
        alone.append(float(lines[False][0]))
    yield Figure("import interposer, what the hundred add", differences, "ms", 0.2)
    yield Figure("import interposer, modules of plugins", [loaded], "", 0.0)
    yield Figure("import interposer without the hundred", alone, "ms")


def resolution_figures(machine: Machine, rounds: int) -> Iterable[Figure]:
    """Yield the resolution of a model, the hundred among the candidates."""
    machine.measure("resolution", plugins=True)
    found = [machine.measure("resolution", plugins=True) for _ in range(rounds)]
    remark = f"{found[0]['requests']} requests"
    first, later = ([row[name] for row in found] for name in ("first", "next"))
    yield Figure(f"resolution of {LAYERS} layers, first of a process", first, "ms", 50.0, remark)
    yield Figure(f"resolution of {LAYERS} layers, later", later, "ms", 50.0, remark)


def call_figures(machine: Machine) -> Iterable[Figure]:
    """Yield the cost of a call of the bound attribute beside one of the function itself."""
    found = machine.measure("call", plugins=True)
    remark = "the attribute is the function" if found["same"] else "ANOTHER FUNCTION"
    yield Figure("direct call of a kernel", found["direct"], "ns")
    # Both are one object, so what differs is the noise of the clock: a hundredth of the call.
    target = 0.01 * statistics.median(found["direct"]) if found["same"] else -1.0
    yield Figure(
        "call of the bound kernel, what it adds", found["difference"], "ns", target, remark
    )


def main() -> None:
    """Print every figure beside its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--rounds", type=int, default=7, help="processes per figure")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    parser.add_argument("--measure", choices=sorted(MEASUREMENTS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        warnings.simplefilter("error")
        print(json.dumps(MEASUREMENTS[arguments.measure]()))
        return
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder))
        print(f"{'':46}{'median':>12}  {'quartiles':>22}{'target':>22}")
        for figure in chain(
            discovery_figures(machine, arguments.rounds),
            import_figures(machine, arguments.rounds),
            resolution_figures(machine, arguments.rounds),
            call_figures(machine),
        ):
            figures.append(figure)
            print(figure, flush=True)
    if arguments.check and not all(figure.holds for figure in figures):
        raise SystemExit(1)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of the docstring."""


if __name__ == "__main__":
    main()
