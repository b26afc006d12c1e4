"""Puts every frozen plugin to use and prints what came of it, as one line of JSON.

It runs in a process of its own that has the plugins installed::

    python exercise.py HOOKS FOLDER

HOOKS is ``same``, or ``grown`` for the hooks of a later core of the same API, or ``shrunk`` for
those of one that breaks it; then the plugins are found and not used. FOLDER takes checkpoints.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partialmethod
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from interposer import Config, Resolver, Site, current_registry, hookspecs, planned
from interposer.errors import InterposerError, NoCandidateError
from interposer.tooling import Plugins
from interposer_engine import LanguageModel, load
from interposer_ops.layers.norm import RMSNorm
from interposer_testing.described import described_placement

MODEL = Path(__file__).parents[2] / "examples" / "models" / "stdlib-lm"
PROMPTS = ("import os\nimport sys\n\ndef main(", "class Reader:\n    def __init__(self, stream")
STEP = 2.0**-7
PLAIN = "o_proj"


def resize_hooks(change: Callable[[list[str]], list[str]]) -> None:
    """Give every hook other arguments, and observers what a later core would pass."""
    for name, spec in list(vars(hookspecs).items()):
        if name.startswith("interposer_"):
            # pluggy reads the names of arguments from the code.
            arguments = change(list(inspect.signature(spec).parameters))
            resized = eval(f"lambda {', '.join(arguments)}: None")
            resized.interposer_spec = spec.interposer_spec
            setattr(hookspecs, name, resized)
    for method in ("observe", "first_result"):
        told = partialmethod(getattr(Plugins, method), later="what old plugins do not know")
        setattr(Plugins, method, told)


def grown(arguments: list[str]) -> list[str]:
    return [*arguments, "later"]


def shrunk(arguments: list[str]) -> list[str]:
    return [argument for argument in arguments if argument != "reason"]


def built(config: Config, path: Path = MODEL) -> LanguageModel:
    return load(path, dtype="float32", config=config, max_sequences=4, cache_tokens=512)


def chosen(resolver: Resolver) -> dict[str, list[str]]:
    """Return the names of what was chosen for each op, layer and so on."""
    found: dict[str, list[str]] = {}
    for choice, _ in resolver.choices.values():
        name = f"{choice.request.kind} {choice.request.name}".strip()
        found[name] = sorted({*found.get(name, []), choice.chosen.qualified_name})
    return found


def outcome(lm: LanguageModel, expected: LanguageModel) -> dict[str, Any]:
    """Return what was chosen for ``lm`` and how it computes beside ``expected``."""
    token_ids = lm.tokenizer.encode(PROMPTS[0])
    difference = (lm.logits(token_ids) - expected.logits(token_ids)).abs().max()
    return {
        "chosen": chosen(lm.resolver),
        "device": lm.placement.device.name,
        "difference": float(difference),
        "generated": generated(lm) == generated(expected),
    }


def generated(lm: LanguageModel) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in lm.generate(PROMPTS, max_new_tokens=8)]


def write_checkpoints(folder: Path) -> tuple[Path, Path]:
    """Return the model with int8 weights, and the model with the numbers that they stand for."""
    stored, plain = folder / "stored", folder / "plain"
    for path in (stored, plain):
        shutil.copytree(MODEL, path)
    tensors = load_file(MODEL / "model.safetensors")
    steps = {
        name: (tensor.float() / STEP).round().clamp(-128, 127)
        for name, tensor in tensors.items()
        if name.endswith("_proj.weight")
    }
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    wide |= {name: tensor * STEP for name, tensor in steps.items()}
    int8 = {name: tensor.to(torch.int8) for name, tensor in steps.items() if PLAIN not in name}
    save_file(wide, plain / "model.safetensors")
    save_file(wide | int8, stored / "model.safetensors")
    config = json.loads((MODEL / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "acme", "step": STEP, "plain": [PLAIN]}
    (stored / "config.json").write_text(json.dumps(config))
    return stored, plain


def as_architecture(folder: Path, architecture: str, **fields: Any) -> Path:
    """Return the model under the name of another architecture, with further fields."""
    path = folder / architecture
    shutil.copytree(MODEL, path)
    config = json.loads((MODEL / "config.json").read_text())
    config |= {"architectures": [architecture], **fields}
    (path / "config.json").write_text(json.dumps(config))
    return path


def refused(path: Path) -> str:
    """Return what a family says of a config that it does not take."""
    try:
        built(Config(), path)
    except InterposerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def use_op(lm: LanguageModel) -> dict[str, Any]:
    """Build the plugin's own layer, whose op is its own as well."""
    layer = import_module("acme_op.layers").Shift(Site(lm.resolver, "shift", torch.float32), 8)
    layer.offset.copy_(torch.arange(8.0))
    layer.finalize()
    x = torch.arange(16.0).view(2, 8)
    expected = torch.cat((x[:, 5:], x[:, :5]), 1) + torch.arange(8.0)
    return {
        "equal": torch.equal(layer(x), expected),
        "module": layer.bound.function.__module__,
        "why": layer.bound.choice.why,
    }


def num_rows(lm: LanguageModel) -> int:
    """Return how many rows the replacement of the norm has counted, of five."""
    norm = RMSNorm(Site(lm.resolver, "norm", torch.float32), 64, 1e-5)
    norm.weight.fill_(1)
    norm(torch.ones(5, 64))
    return int(norm.num_rows)  # type: ignore[arg-type]


def refusal(lm: LanguageModel) -> str:
    """Return what is said of rows that the plugin's predicate refuses."""
    try:
        RMSNorm(Site(lm.resolver, "odd", torch.float32), 63, 1e-5)
    except NoCandidateError as error:
        return str(error)
    return "nothing"


def described() -> dict[str, list[str]]:
    """Return what would be chosen on a device that the plugins describe."""
    placement = described_placement(current_registry(), "acme-mini")
    return chosen(planned(MODEL, dtype="float32", placement=placement).resolver)


def use_all(acme: Sequence[str], folder: Path) -> dict[str, Any]:
    expected = built(Config(disable=frozenset(acme)))
    kernels = built(
        Config(
            kernels={op: f"acme-kernel/{op}_acme" for op in ("rms_norm", "linear", "silu_and_mul")}
        )
    )
    layer = built(Config(layers={"rms_norm": "acme-layer/acme_norm"}))
    attention = built(Config(attention={"decoder": "acme-attention/rows"}))
    platform = built(Config(platform="acme"))
    # The table is the head's as well, which is multiplied by another form of it here.
    table = built(Config(kernels={"embedding": "acme-object/embedding_acme"}))
    stored, plain = write_checkpoints(folder)
    scheme = built(Config(), stored)
    frame = as_architecture(folder, "AcmeForCausalLM")
    derived = as_architecture(folder, "AcmeDerivedForCausalLM", sliding_window=512)
    flagged = as_architecture(folder / "flagged", "AcmeDerivedForCausalLM", acme_flag=True)
    return {
        "kernel": outcome(kernels, expected),
        "layer": outcome(layer, expected),
        "attention": outcome(attention, expected),
        "platform": outcome(platform, expected),
        "scheme": outcome(scheme, built(Config(disable=frozenset(acme)), plain)),
        "object": outcome(table, expected),
        "frame": outcome(built(Config(), frame), expected),
        "derived": outcome(built(Config(), derived), expected),
        "refused": refused(flagged),
        "op": use_op(kernels),
        "table": use_op(platform),
        "described": described(),
        "refusal": refusal(kernels),
        "num_rows": num_rows(layer),
        "num_choices": import_module("acme_object.plugin").acme.num_choices,
        "seen": import_module("acme_observer.plugin").SEEN,
    }


def main(hooks: str, folder: str) -> None:
    if hooks != "same":
        resize_hooks(grown if hooks == "grown" else shrunk)
    plugins = current_registry().plugins
    report: dict[str, Any] = {
        "loaded": {plugin.name: plugin.version for plugin in plugins.loaded},
        "failed": {failure.name: failure.error.reason for failure in plugins.failed},
    }
    if hooks != "shrunk":
        acme = [name for name in report["loaded"] if name.startswith("acme-")]
        report |= use_all(acme, Path(folder))
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
