"""A process that uses plugins as a program does, and reports what became of each and of itself.

It reads visits as JSON from its input and writes one line of JSON per visit to the file that its
argument names. Its own output is for the plugins to spoil.
"""

from __future__ import annotations

import builtins
import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from interposer import Choice, Config, Registry, Resolver, Site, current_registry, place
from interposer.errors import InterposerError
from interposer.tooling import Lock, installed_distributions
from interposer_engine import plan
from interposer_ops.caches import reshape_and_cache
from interposer_ops.layers.norm import RMSNorm

MODEL = Path(__file__).parents[2] / "examples" / "models" / "stdlib-lm"
EPS = 1e-5
# Seconds after which a visit that hangs is ended. All plugins at once take 44 s of processor time,
# 0.15 s each, where nothing is remembered: a busy machine may give them a seventh of a processor.
PATIENCE = 300
CACHE: dict[str, int | bool] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 16,
    "page_size": 16,
    "windowed": False,
    "softcapped": False,
}
Reason = tuple[str, str, str, str]  # stage, name, provider, text


def visit(task: dict[str, Any]) -> dict[str, Any]:
    """Return the reasons by which plugins were refused, what was computed and what was changed."""
    before = snapshot()
    reasons: list[Reason] = []
    report: dict[str, Any] = {"name": task["name"], "reasons": reasons, "error": "", "kernel": ""}
    try:
        config = Config(**task["config"])
        if task["calls"]:
            # A call of a kernel has a multiple of the time that the import of its plugin has.
            current_registry(config)
            config = config.model_copy(update={"probe_seconds": task["calls"]})
        use = lock if task["use"] == "lock" else attempt
        use(task, config, reasons)
        layer, right = norm(config, reasons)
        report |= {"kernel": layer.norm.__module__, "right": right}
        if task["use"] in ("attention", "model", "tuning", "everything"):
            planned = plan(MODEL, config=config)
            reasons += chosen(planned.resolver)
        reasons += failed(current_registry(config))
    except BaseException:  # noqa: BLE001 - Ctrl-C too is a plugin's here
        report["error"] = traceback.format_exc()
    report["changes"] = [name for name, value in snapshot().items() if value != before[name]]
    report["imported"] = sorted(name for name in sys.modules if name.startswith("hostile_"))
    return report


def attempt(task: dict[str, Any], config: Config, reasons: list[Reason]) -> None:
    """Place without the pin on a platform, if the visit asks for it."""
    if task["use"] != "platform":
        return
    free = config.model_copy(update={"platform": None})
    try:
        choice = place(free).choice
    except InterposerError as error:
        reasons.append(("platform", "", "", str(error)))
    else:
        reasons += refused("platform", choice)


def lock(task: dict[str, Any], config: Config, reasons: list[Reason]) -> None:
    """Lock what is installed and use it under the lock."""
    names = config.plugins or frozenset()
    found = [d for d in installed_distributions() if d.name in names]
    there = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Lock.of(found).write(Path("interposer.lock"))
            current_registry(config.model_copy(update={"locked": True}))
        except InterposerError as error:
            reasons.append(("lock", "", "", f"{type(error).__name__}: {error}"))
        finally:
            os.chdir(there)


def norm(config: Config, reasons: list[Reason]) -> tuple[RMSNorm, bool]:
    """Return a norm layer and whether it computes what it should."""
    resolver = Resolver(current_registry(config), place(config).device, config)
    layer = RMSNorm(Site(resolver, "norm", torch.float32), 64, EPS)
    layer.weight.copy_(torch.linspace(0.5, 1.5, 64))
    layer.finalize()
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    given = x.clone()
    expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    right = torch.allclose(layer(x).double(), expected * layer.weight.double())
    Site(resolver, "cache", torch.float32).bind(reshape_and_cache, **CACHE)
    reasons += chosen(resolver)
    return layer, right and torch.equal(x, given)


def chosen(resolver: Resolver) -> Iterator[Reason]:
    for choice, _ in resolver.choices.values():
        yield from refused(choice.request.kind, choice)


def refused(stage: str, choice: Choice) -> Iterator[Reason]:
    for refusal in choice.refusals:
        yield stage, refusal.candidate, refusal.provider, refusal.reason
    yield "tie", choice.chosen.name, choice.chosen.origin, choice.why
    for note in choice.notes:
        yield "tuning", choice.chosen.name, choice.chosen.origin, note


def failed(registry: Registry) -> Iterator[Reason]:
    for failure in registry.plugins.failed:
        yield "discovery", failure.name, failure.distribution, failure.error.reason


def snapshot() -> dict[str, Any]:
    """Return everything that a plugin could leave changed."""
    return {
        "environment": dict(os.environ),
        "working directory": Path.cwd(),
        "builtins": dict(vars(builtins)),
        "sys.path": list(sys.path),
        "import hooks": (list(sys.meta_path), list(sys.path_hooks)),
        "streams": (sys.stdin, sys.stdout, sys.stderr, sys.excepthook),
        "modules": [sys.modules.get(name) for name in ("json", "os", "signal", "sys", "torch")],
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("hostile")),
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "torch": (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tasks = json.load(sys.stdin)
    with Path(sys.argv[1]).open("a", encoding="utf-8") as reports:
        for task in tasks:
            # Ends the process and says where it hangs, whoever holds the interpreter's lock.
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            reports.write(json.dumps(visit(task)) + "\n")
            reports.flush()


if __name__ == "__main__":
    main()
