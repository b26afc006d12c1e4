"""Kernels of installed plugins are timed in a process of their own, and cannot reach the tuner."""

from __future__ import annotations

import json
import os
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from interposer import Config, Resolver, Site, current_registry
from interposer.records import load_target
from interposer.tooling import default_store
from interposer_tools import Table, tune
from interposer_tools._commands import tune as command

_OPS = """
import os
import torch
from interposer import Capability, Case, Device, Platform, Verdict, custom_op

DEVICE = Device("acmetune", "cpu", "a bench", Capability("any"))

class Bench(Platform):
    name, device_type = "acmetune", "cpu"

    @classmethod
    def probe(cls): return Verdict.accept()
    def devices(self): return [DEVICE]
    def capability(self, device): return DEVICE.capability
    def dtypes(self, device): return [torch.float32]
    def synchronize(self, device): pass

def cases(dtype, seed):
    yield sample(dtype, {"width": 4}, 2, seed)

def sample(dtype, dims, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, dims["width"], generator=generator).to(dtype)
    return Case(f"{num_tokens} tokens", {"x": x, "weight": torch.ones(dims["width"])}, dims)

@custom_op("acme_tuned", cases=cases, constants=("weight",), sample=sample)
def acme_tuned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * weight
"""
_KERNELS = """
import os, time
import torch

TUNER = {tuner}
seen = {{}}
real, start = time.perf_counter, time.perf_counter()

def outside(function):
    def kernel(x, weight):
        assert os.getpid() != TUNER, "it shares a process with the tuner"
        return function(x, weight)
    return kernel

@outside
def honest(x, weight): return x * weight
@outside
def prepared(x, weight): return x * weight[0]
def prepare(weight): return {{"weight": weight[None]}}
@outside
def replays(x, weight): return seen.setdefault(x.shape, x * weight)
@outside
def patches_the_clock(x, weight):
    time.perf_counter = lambda: start + (real() - start) / 100
    return x * weight
"""
_PLUGIN = """
from interposer.hookspecs import hookimpl
from interposer.records import Kernel, OpEntry, PlatformEntry

INTERPOSER_API = ">=1.0,<2"

@hookimpl
def interposer_records():
    at = "acme_tuned_kernels:"
    names = ("honest", "replays", "patches_the_clock")
    return [
        PlatformEntry("acmetune", "acme_tuned_ops:Bench"),
        OpEntry("acme_tuned", "acme_tuned_ops:acme_tuned"),
        Kernel("acme_tuned", "prepared", at + "prepared", prepare=at + "prepare", score=9.0),
        *(Kernel("acme_tuned", name, at + name, score=1.0) for name in names),
    ]
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a plan with the op of an installed plugin."""
    kernels = _KERNELS.format(tuner=os.getpid())
    modules = {"acme_tuned_ops": _OPS, "acme_tuned_kernels": kernels, "acme_tuned_plugin": _PLUGIN}
    info = tmp_path / "acme_tuned-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tuned\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[interposer.plugins]\nacme = acme_tuned_plugin\n")
    (info / "RECORD").write_text("".join(f"{name}.py,,\n" for name in modules))
    for name, source in modules.items():
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    config = Config(isolation="off", plugins={"acme-tuned"}, cache_dir=str(tmp_path / "cache"))
    registry = current_registry(config)
    (platform,) = (c for c in registry.candidates("platform") if c.provider == "acme-tuned")
    bench = load_target("acme_tuned_ops:Bench")()
    (device,) = bench.devices()
    resolver = Resolver(registry, device, config, trusted=frozenset({"acme-tuned"}))
    Site(resolver, "model", torch.float32).bind_kernel(
        load_target("acme_tuned_ops:acme_tuned"), width=16
    )
    choice = SimpleNamespace(chosen=platform)
    placement = SimpleNamespace(platform=bench, device=device, choice=choice)
    return SimpleNamespace(resolver=resolver, placement=placement, path=tmp_path)


@pytest.mark.process
def test_cheats_do_not_become_the_fastest(plan: SimpleNamespace) -> None:
    readings = count()
    table = tune(plan, tokens=(2, 3), repeats=3, timer=lambda: float(next(readings)))
    (entry,) = table.entries
    names = ("reference", "honest", "prepared", "patches_the_clock")
    seconds = {name: figures.seconds for name, figures in entry.value.candidates.items()}
    # By the tuner's clock, each batch of one call takes a second.
    assert seconds == {f"acme-tuned/{name}": pytest.approx(1.0) for name in names}
    assert entry.value.failed.keys() == {"acme-tuned/replays"}
    _, replays = entry.value.failed["acme-tuned/replays"]
    assert replays.startswith("returned a wrong result: output 0: ")
    assert table.in_process == ()
    assert Table.stored(default_store(plan.resolver.config)).entries == table.entries


def test_measurements_in_the_tuners_process_are_listed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    facts = {
        "in_process": [
            {"request": "kernel 'a'", "candidate": name, "reason": "because of b"}
            for name in ("acme/one", "acme/two")
        ],
        "not_measured": [{"request": "layer 'c'", "reason": "because of d"}],
    }
    command._print(Table.model_validate_json(json.dumps(facts)))
    assert capsys.readouterr().out == (
        "timed in this process, because of b: kernel 'a'\nnot measured, because of d: layer 'c'\n"
    )
