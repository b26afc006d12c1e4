"""Compare models with varied LoRA adapters with those of PEFT.

    python compare_adapters.py FIRST END [--keep FOLDER] [--refusals]

As ``compare.py``, for ``adapter_config.json``.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

sys.path.insert(0, str(Path(__file__).parents[4]))

from models.engine.tests.variants.adapter_variations import KINDS, vary
from models.engine.tests.variants.compare import (
    BOUND,
    PROMPT,
    Comparison,
    Outcome,
    base_configs,
    draw_weights,
    reference_logits,
    relative_difference,
    run,
)

from interposer.errors import InterposerError
from interposer_engine import LanguageModel, load

# Architectures of dense layers; mixtures have tests of their own.
_EXAMPLES = ("llama", "qwen3", "gemma2", "gpt2", "phi3", "olmo2")


@functools.cache
def bases() -> list[tuple[str, Path, LanguageModel]]:
    """Return the models that adapters are for: name, folder, and the loaded model."""
    found = []
    for name in _EXAMPLES:
        config = next(c for n, c in sorted(base_configs().items()) if n.startswith(f"{name}-"))
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).float()
        draw_weights(model, 0)
        model.save_pretrained(folder)
        lm = load(folder, "float32", platform="cpu", cache_tokens=128, max_sequences=1)
        found.append((name, folder, lm))
    return found


def plain(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def write_adapter(base: Path, folder: Path, how: dict[str, Any], seed: int) -> None:
    """Save an adapter of random numbers for the model in ``base``."""
    from peft import LoraConfig, get_peft_model

    model = plain(base)
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and "lm_head" not in name
    ]
    wrapped = get_peft_model(
        model, LoraConfig(**{**how, "target_modules": linear, "init_lora_weights": False})
    )
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.15, generator=generator)
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)


def judge(base: Path, lm: LanguageModel, folder: Path) -> Outcome:
    """Return the outcome of an adapter: equal, refused, or a fault in capital letters."""
    from peft import PeftModel

    try:
        model: Any = PeftModel.from_pretrained(plain(base), folder).eval()
        expected = reference_logits(model, PROMPT)
    except Exception as error:  # noqa: BLE001 - whatever PEFT raises
        return Outcome("not taken by PEFT", f"{type(error).__name__}: {error}")
    try:
        lm.load_adapter("varied", folder)
        difference = relative_difference(lm.logits(PROMPT, adapter="varied"), expected)
    except InterposerError as error:
        return Outcome("refused", str(error))
    except Exception as error:  # noqa: BLE001 - what is to be found
        return Outcome("CRASH", f"{type(error).__name__}: {error}")
    finally:
        if "varied" in lm.adapters:
            lm.remove_adapter("varied")
    if not difference < BOUND:
        return Outcome("DIFFERENT", f"logits differ by {difference:.2g} of the largest")
    return Outcome("equal", "")


def compare(first: int, end: int) -> Iterator[Comparison]:
    """Compare adapters by their numbers, each in a folder that its reader may copy."""
    for number in range(first, end):
        name, base, lm = bases()[number % len(bases())]
        generator = random.Random(number)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "adapter"
            write_adapter(base, folder, generator.choice(KINDS), number)
            file = folder / "adapter_config.json"
            settings, changes = vary(json.loads(file.read_text(encoding="utf-8")), generator)
            file.write_text(json.dumps(settings), encoding="utf-8")
            yield Comparison(number, name, changes, judge(base, lm, folder), folder)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    run(compare, str(__doc__))
