"""Plugins whose records contradict each other, point nowhere, or name parts that do not fit."""

from __future__ import annotations

from tests.hostile.case import Hostile, provides
from tests.hostile.native import LOADED

__all__ = ["CASES"]

KERNEL = 'Kernel("rms_norm", {name!r}, "$package.kernels:rms_norm")'
KERNELS = "from interposer_ops.norms._norms import rms_norm as op\n\nrms_norm = op.reference\n"
LAYER = 'LayerEntry("rms_norm", "norm_$name", "$package.layers:Norm", score=1000.0)'
BACKEND = 'AttentionEntry("attention_$name", "$package.attention:Backend", score=1000.0)'
FAMILY = 'ModelEntry(("LlamaForCausalLM",), "family_$name", "$package.family:Family", score=1000.0)'
PLATFORM = 'PlatformEntry("hostile", "$package.platforms:Hostile", score=1000.0)'

PLATFORM_HEAD = """
import torch
from interposer import Capability, Device, Platform, Verdict


class Hostile(Platform):
    name = "hostile"
    device_type = "cpu"

    @classmethod
    def probe(cls):
        {probe}

    def devices(self):
        {devices}

    def capability(self, device):
        return Capability("hostile")
"""
DTYPES = "\n    def dtypes(self, device):\n        return [torch.float32]\n"
ACCEPTS = "return Verdict.accept()"
LISTS = 'return [Device("hostile", "cpu", "hostile", self.capability("cpu"))]'


def _named(name: str, kernel: str, *words: str) -> Hostile:
    files = {"plugin.py": provides(KERNEL.format(name=kernel)), "kernels.py": KERNELS}
    return Hostile(name, files, words)


def _layer(name: str, source: str, *words: str) -> Hostile:
    files = {"plugin.py": provides(LAYER), "layers.py": source}
    return Hostile(name, files, words)


def _backend(name: str, body: str, *words: str) -> Hostile:
    source = (
        "from interposer import Verdict\nfrom interposer_ops.layers.attention import PagedBackend"
        "\n\n\nclass Backend(PagedBackend):\n    @classmethod\n"
        f"    def accepts(cls, spec, capability):\n        {body}\n"
    )
    files = {"plugin.py": provides(BACKEND), "attention.py": source}
    return Hostile(name, files, words, "attention")


def _family(name: str, body: str, *words: str) -> Hostile:
    source = (
        "from interposer_models.families import Llama\n\n\nclass Family(Llama):\n"
        f"    @classmethod\n    def parse(cls, config, source):\n        {body}\n"
    )
    return Hostile(name, {"plugin.py": provides(FAMILY), "family.py": source}, words, "model")


def _platform(
    name: str, *words: str, probe: str = ACCEPTS, devices: str = LISTS, dtypes: str = DTYPES
) -> Hostile:
    source = PLATFORM_HEAD.format(probe=probe, devices=devices) + dtypes
    files = {"plugin.py": provides(PLATFORM), "platforms.py": source}
    return Hostile(name, files, words, "platform" if dtypes else "discovery")


def _table(name: str, content: str, *words: str) -> Hostile:
    record = 'TuningEntry("table_$name", "*", "$package:table.json")'
    return Hostile(name, {"plugin.py": provides(record), "table.json": content}, words, "tuning")


CASES = (
    Hostile(
        "duplicate-records",
        {"plugin.py": provides(*[KERNEL.format(name="rms_norm_twice")] * 2), "kernels.py": KERNELS},
        ("rms_norm_twice", "twice"),
    ),
    Hostile(
        "op-taken",
        {
            "plugin.py": provides('OpEntry("rms_norm", "$package.kernels:op")'),
            "kernels.py": KERNELS,
        },
        ("rms_norm", "interposer-ops"),
        loads=True,
    ),
    Hostile(
        "nowhere-module",
        {"plugin.py": provides(KERNEL.format(name="rms_norm_nowhere"))},
        ("$package.kernels", "there is no module"),
    ),
    Hostile(
        "nowhere-attribute",
        {"plugin.py": provides(KERNEL.format(name="rms_norm_nowhere")), "kernels.py": "x = 1\n"},
        ("$package.kernels", "has no 'rms_norm'"),
    ),
    Hostile(
        "nowhere-resource",
        {"plugin.py": provides('DeviceEntry("d1", "cpu", "$package:devices/d1.json")')},
        ("$package:devices/d1.json", "points nowhere"),
    ),
    _named("unicode-name", "rms_norm_\u202e名前\N{SNOWMAN}", "printable ASCII"),
    _named("line-in-name", "rms_norm\n-> rms_norm (interposer-ops 0.1.0)", "printable ASCII"),
    _named("long-name", "rms_norm_" + "x" * 100_000, "100,009 characters"),
    _layer(
        "layer-signature",
        "from interposer_ops.layers.norm import RMSNorm\n\n\nclass Norm(RMSNorm):\n"
        "    def __init__(self, site, hidden_size):\n"
        "        super().__init__(site, hidden_size, 1e-6)\n",
        "hidden_size",
        "RMSNorm takes",
    ),
    _layer(
        "layer-stranger",
        "from torch import nn\n\n\nclass Norm(nn.Module):\n    pass\n",
        "subclass",
    ),
    _layer("layer-aborts", "import os; os.abort()\nclass Norm: pass\n", "SIGABRT"),
    _platform("platform-abstract", "dtypes", dtypes=""),
    _platform("probe-raises", "OSError", "no driver", probe="raise OSError('no driver')"),
    _platform("probe-bool", "True", "Verdict", probe="return True"),
    _platform("probe-crashes", "SIGABRT", probe="import os; os.abort()"),
    _platform("probe-loops", "within 1.5 s", probe="\n        while True: pass"),
    _platform("devices-raise", "OSError", "no bus", devices="raise OSError('no bus')"),
    _platform("devices-crash", "SIGABRT", devices="import os; os.abort()"),
    _platform("devices-numbers", "lists 1, which is no Device", devices="return [1]"),
    _platform(
        "devices-endless",
        "lists no device",
        "TypeError",
        devices="from itertools import repeat\n"
        "        return (each for each in repeat(self.capability('cpu')))",
    ),
    _platform("no-devices", "lists no device", devices="return []"),
    _backend("accepts-raises", "raise OSError('no such device')", "OSError", "no such device"),
    _backend("accepts-bool", "return True", "True", "Verdict"),
    _backend("accepts-crashes", f"exec({LOADED!r})", "SIGSEGV"),
    _family("family-raises", "raise OSError('no such model')", "OSError", "no such model"),
    _family("family-number", "return 7", "returned 7, not a ModelFamily"),
    _family("family-crashes", "import os; os.abort()", "SIGABRT"),
    _family("family-loops", "\n        while True: pass", "within 1.5 s"),
    _table("corrupt-table", '{"version": 1, "entries": [', "table.json"),
    # A pickle that would run a command, if somebody loaded it.
    _table("pickle-table", "cos\nsystem\n(S'touch $name'\ntR.", "table.json"),
)
