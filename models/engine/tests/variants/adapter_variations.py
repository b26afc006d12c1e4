"""Ways to state the fields of a LoRA adapter's ``adapter_config.json``, right and wrong ones.

A variation changes the file as PEFT writes it. To extend the tester with a new report, add a value
to a table here, or a function to ``VARIATIONS``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

__all__ = ["KINDS", "vary"]

Settings = dict[str, Any]
Variation = Callable[[Settings, random.Random], str]

# What the adapters are trained with, as arguments of ``LoraConfig``; "all" is all linear layers.
KINDS: tuple[Settings, ...] = (
    {"r": 4, "lora_alpha": 6, "target_modules": "all"},
    {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": "all"},
    {
        "r": 8,
        "target_modules": "all",
        "rank_pattern": {"layers.1": 3, ".*_proj": 2},
        "alpha_pattern": {"v_proj": 5, "c_attn": 3},
    },
)
VALUES: dict[str, tuple[Any, ...]] = {
    "alpha_pattern": ({}, None, {"q_proj": 7.5}, {".*": 3}, {"o_proj$": 2}, []),
    "auto_mapping": ({"base_model_class": "LlamaForCausalLM"},),
    "base_model_name_or_path": (None, "", "somebody/else"),
    "bias": ("none", None, "all", "lora_only"),
    "exclude_modules": (None, ["lm_head"], ["q_proj"], "q_proj", [], ".*o_proj"),
    "fan_in_fan_out": (True, False, None),
    "inference_mode": (False, True, None),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "pissa", "olora"),
    "layer_replication": (None, [[0, 1], [0, 2]]),
    "layers_pattern": (None, "layers", "h", []),
    "layers_to_transform": (None, 0, [0], [1], [0, 1], []),
    "lora_alpha": (16, 0.5, 1, None, "16"),
    "lora_bias": (False, True, None),
    "lora_dropout": (0.1, 0, None),
    "megatron_config": (None, {}),
    "modules_to_save": (None, [], ["lm_head"]),
    "peft_type": ("lora", "LORA", None, "IA3"),
    "r": (4, 8, 2, None, "8"),
    "rank_pattern": ({}, None, {"q_proj": 2}, {".*": 4}),
    "revision": (None, "main"),
    "target_modules": (["q_proj"], ["q_proj", "v_proj"], "all-linear", None, ".*_proj", [], ["no"]),
    "target_parameters": (None, [], ["mlp.experts.gate_up_proj"]),
    "task_type": (None, "CAUSAL_LM", "SEQ_CLS"),
    "trainable_token_indices": (None, [1, 2]),
    "use_dora": (False, None, True, 0),
    "use_qalora": (False, None, True),
    "use_rslora": (False, True, None, 1, 0, "true"),
}


def state_value(config: Settings, generator: random.Random) -> str:
    name = generator.choice(sorted(VALUES))
    config[name] = generator.choice(VALUES[name])
    return f"{name} is {config[name]!r}"


def drop_field(config: Settings, generator: random.Random) -> str:
    name = generator.choice(sorted(config))
    del config[name]
    return f"{name} is absent"


def add_unknown_field(config: Settings, generator: random.Random) -> str:
    value = generator.choice([None, False, 3, "new"])
    config["use_something_new"] = value
    return f"use_something_new is {value!r}"


VARIATIONS: tuple[Variation, ...] = (*(state_value,) * 8, *(drop_field,) * 2, add_unknown_field)


def vary(config: Settings, generator: random.Random) -> tuple[Settings, list[str]]:
    """Return a changed copy of ``config``, and descriptions of one or two changes."""
    changed, changes = copy.deepcopy(config), list[str]()
    while len(changes) < generator.choice([1, 1, 2]):
        changes.append(generator.choice(VARIATIONS)(changed, generator))
    return changed, changes
