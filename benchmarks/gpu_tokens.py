"""Compare logits and tokens of a model on an accelerator: transformers, eager steps, graphs.

    python benchmarks/gpu_tokens.py MODEL_DIR [--platform NAME] [--json FILE]

Instead of a directory there may be the name of a shape of ``random_model.py``.

Transformers' float32 logits, computed on the processor, are the truth. In 16 bits ours may be as
far from them as transformers' are in 16 bits on the device; in float32 greedy tokens have to be
the same, unless the truth itself has two that are as good. Steps as graphs have to draw the very
tokens of steps without, greedily and with a seed.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

from evidence.record import Deadline, Record, add_step_options
from gpu_clock import placement_of
from interposer import Config, Placement
from interposer_engine import LanguageModel, SamplingParams, load
from random_model import SHAPES, write_model

PROMPTS = (
    "import os\n",
    "class Stack:\n    def __init__(self):\n",
    "def read(path):\n    with open(path) as file:\n",
    "from collections import",
    "    for name in sorted(",
)
# Logits closer than this are equally good: float32 sums in another order differ by about 1e-4.
_TIE = 1e-2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    add_step_options(parser)
    options = parser.parse_args()
    placement = placement_of(options.platform, options.tiny)
    record, deadline = Record(options.json), Deadline(options.seconds)
    prompts = PROMPTS[:1] if options.tiny else PROMPTS
    tokens = 3 if options.tiny else 64
    folders = ExitStack()
    path = Path(options.model)
    if options.model in SHAPES:
        path = Path(folders.enter_context(tempfile.TemporaryDirectory()))
        write_model(options.model, path)
    comparison = Comparison(path, placement, prompts, tokens, record)
    steps: list[tuple[str, Any]] = [
        ("float32", lambda: comparison.greedy()),
        ("graphs", lambda: comparison.graphs("bfloat16")),
        ("bfloat16", lambda: comparison.logits("bfloat16")),
    ]
    for name, step in steps[:2] if options.tiny else steps:
        if not deadline.allows(5.0):
            record.skip(f"no time for {name}")
            continue
        with record.guarded(name):
            step()
        gc.collect()
    folders.close()
    record.headline = "; ".join(row["told"] for row in record.rows) or "nothing was compared"
    record.say(record.headline)


class Comparison:
    """One model on one device, beside transformers."""

    def __init__(
        self,
        path: Path,
        placement: Placement,
        prompts: tuple[str, ...],
        num_tokens: int,
        record: Record,
    ) -> None:
        self.path = path
        self.placement = placement
        self.prompts = prompts
        self.num_tokens = num_tokens
        self.record = record

    def loaded(self, dtype: str, graphs: Literal["auto", "off"] = "auto") -> LanguageModel:
        config = Config(platform=self.placement.platform.name, graphs=graphs)
        return load(
            self.path,
            dtype=dtype,
            config=config,
            cache_tokens=2048,
            max_sequences=8,
        )

    def greedy(self) -> None:
        """Compare greedy float32 tokens with those of transformers, on the logits of the truth."""
        lm = self.loaded("float32")
        found = lm.generate([*self.prompts], max_new_tokens=self.num_tokens, ignore_eos=True)
        logits = theirs(self.path, torch.float32, "cpu")
        same, worst = 0, 0.0
        for prompt, completion in zip(self.prompts, found, strict=True):
            ids = lm.tokenizer.encode(prompt)
            given = list(completion.token_ids)
            truth = logits([*ids, *given])[len(ids) - 1 : -1]
            short = truth.amax(-1) - truth.gather(1, torch.tensor(given)[:, None])[:, 0]
            worst = max(worst, float(short.max()))
            same += int((short == 0).sum())
        total = len(self.prompts) * self.num_tokens
        if worst > _TIE:
            self.record.fault(f"float32: a greedy token is {worst:.3g} below the likeliest")
        told = f"float32: {same} of {total} tokens are the truth's"
        self.record.row(told, told=told, same=same, total=total, worst=worst)

    def graphs(self, dtype: str) -> None:
        """Compare tokens of steps with and without graphs."""
        params = [
            SamplingParams(max_new_tokens=self.num_tokens, ignore_eos=True),
            SamplingParams(
                max_new_tokens=self.num_tokens, ignore_eos=True, temperature=0.8, seed=7
            ),
        ]
        tokens: dict[str, list[list[int]]] = {}
        captured = "not asked for"
        both: tuple[Literal["auto", "off"], ...] = ("off", "auto")
        for graphs in both:
            lm = self.loaded(dtype, graphs)
            if graphs == "auto":
                if not self.placement.platform.provides("capture_graph"):
                    self.record.skip(f"{self.placement.platform.name} has no graphs to compare")
                    return
                if not lm.graphs:
                    reason = lm.graphs.reason if lm.graphs is not None else "nobody asks for them"
                    self.record.fault(f"steps are no graphs: {reason}")
                    return
            tokens[graphs] = [
                list(completion.token_ids)
                for param in params
                # Alone, and as a batch: other buckets, and so other graphs.
                for given in ([self.prompts[0]], [*self.prompts])
                for completion in lm.generate(given, param)
            ]
            running = lm.engine.runner.graphs
            captured = f"{len(running) if running is not None else 0} graphs"
        same = sum(one == other for one, other in zip(*tokens.values(), strict=True))
        total = len(tokens["off"])
        if same < total:
            self.record.fault(f"{dtype}: {total - same} of {total} differ with graphs")
        told = f"{dtype}: {same} of {total} sequences are the same with {captured}"
        self.record.row(told, told=told, same=same, total=total)

    def logits(self, dtype: str) -> None:
        """Compare the error of logits with that of transformers on the same device."""
        lm = self.loaded(dtype)
        device = self.placement.device.torch_device
        truth = theirs(self.path, torch.float32, "cpu")
        logits_by_name = {
            "ours": lm.logits,
            "transformers": theirs(self.path, getattr(torch, dtype), device),
        }
        generator = torch.Generator().manual_seed(0)
        size = lm.engine.model.config.vocab_size
        drawn = [torch.randint(size, (n,), generator=generator).tolist() for n in (1, 17, 150)]
        ids = [lm.tokenizer.encode(prompt) for prompt in self.prompts] + drawn
        wanted = torch.cat([truth(one) for one in ids])
        errors = {
            name: float(
                (torch.cat([logits(one).cpu() for one in ids]) - wanted).square().mean().sqrt()
            )
            for name, logits in logits_by_name.items()
        }
        told = (
            f"{dtype}: rms error {errors['ours']:.2e}, of transformers {errors['transformers']:.2e}"
        )
        if not errors["ours"] <= errors["transformers"]:
            self.record.fault(told)
        self.record.row(told, told=told, **errors)


def theirs(path: Path, dtype: torch.dtype, device: str) -> Any:
    """Return transformers' logits after every token, ``[T, V]`` float32 on the processor."""
    from transformers import AutoModelForCausalLM

    # Any, because the type of the model's self excludes what from_pretrained returns.
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = model.to(device).eval()

    def logits(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            out: torch.Tensor = model(torch.tensor([token_ids], device=device)).logits[0]
            return out.float().cpu()

    return logits


if __name__ == "__main__":
    main()
