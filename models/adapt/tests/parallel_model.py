"""Adapt checkpoints that two processes hold in parts, and print what came of each as JSON.

torchrun --nproc-per-node 2 models/adapt/tests/parallel_model.py FOLDER tp:NAME ep:NAME ...
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from interposer.errors import InterposerError
from interposer_adapt import adapt, language_model

IDS = torch.arange(1, 13).view(2, 6)
PADDING = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def refusal(attempt: Any) -> str:
    try:
        attempt()
    except InterposerError as error:
        return str(error)
    return ""


def run(kind: str, path: Path) -> dict[str, Any]:
    sizes: dict[str, Any] = {"tp": {"tp_size": 2}, "ep": {"tp_size": 2, "ep_size": 2}}[kind]
    model = AutoModelForCausalLM.from_pretrained(
        path, distributed_config=DistributedConfig(**sizes), dtype=torch.float32
    ).eval()

    def results() -> tuple[torch.Tensor, ...]:
        options = {"max_new_tokens": 8, "do_sample": False}
        tokens = model.generate(input_ids=IDS, attention_mask=PADDING, **options)
        with torch.no_grad():
            logits = model(IDS).logits
        return tokens, logits, model(IDS).logits.detach()

    state = saved(model, path / "before")
    expected = results()
    refused = refusal(lambda: adapt(model, quantization="int8"))
    adapted = adapt(model)
    called: list[str] = []
    handle = model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda *_: called.append("o_proj")
    )
    found = results()
    handle.remove()
    found_state = saved(model, path / "after")
    lm = language_model(adapted, cache_tokens=256)
    done = lm.generate([IDS[1].tolist(), IDS[0, 2:].tolist()], max_new_tokens=8, ignore_eos=True)
    rows = [expected[0][1, 6:].tolist(), expected[0][0, 6:].tolist()]
    places = {place.name: place.is_bound for place in adapted.places}
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    largest = float(expected[1].abs().max())
    outcome = {
        "tokens": torch.equal(found[0], expected[0]),
        "distances": [
            float((a - b).abs().max()) / largest
            for a, b in zip(found[1:], expected[1:], strict=True)
        ],
        "left": [name for name in linears if not places[name]],
        "linears": len(linears),
        "experts": [bound for name, bound in places.items() if name.endswith("experts")],
        "saved": same(found_state, state),
        "hooks": len(called),
        "quantization": refused,
        "engine": [[*completion.token_ids] for completion in done] == rows,
    }
    adapted.restore()
    outcome["restored"] = all(
        torch.equal(a, b) for a, b in zip(results(), expected, strict=True)
    ) and same(saved(model, path / "restored"), state)
    return outcome


def main() -> None:
    folder, *asked = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        found = {each: run(*split(folder, each)) for each in asked}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, found)
    if dist.get_rank() == 0:
        json.dump(gathered, sys.stdout)
    dist.destroy_process_group()


def split(folder: str, asked: str) -> tuple[str, Path]:
    kind, _, name = asked.partition(":")
    return kind, Path(folder) / name


if __name__ == "__main__":
    main()
