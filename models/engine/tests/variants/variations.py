"""Ways in which published checkpoints spell the same fields, and fields that go wrong.

A variation changes a ``config.json`` as transformers writes it. To extend the tester with a new
report, add a spelling to a table here, or a function to ``VARIATIONS``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["VARIATIONS", "numbered", "vary"]

Settings = dict[str, Any]
Variation = Callable[[Settings, random.Random], str]

# Fields that say how a file was written, which every loader ignores.
_PROVENANCE = {"transformers_version", "_name_or_path", "architectures", "model_type"}

ROPE_SCALINGS: dict[str, Settings] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn with its settings": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.3,
    },
    "default": {},
    "unheard-of": {"factor": 2.0},
}
ACTIVATIONS = (
    "gelu",
    "gelu_fast",
    "gelu_new",
    "gelu_pytorch_tanh",
    "quick_gelu",
    "relu",
    "relu2",
    "silu",
    "swish",
    "tanh",
    "unheard-of",
)

ADDED_FIELDS: tuple[tuple[str, Any], ...] = (
    ("quantization_config", None),
    ("use_cache", False),
    ("pad_token_id", None),
    ("attn_implementation", "flash_attention_2"),
    ("_attn_implementation_autoset", True),
    ("auto_map", {"AutoConfig": "configuration.Own"}),
    ("use_mrope", False),
    ("mlp_only_layers", []),
    ("rope_scaling", None),
    ("partial_rotary_factor", 0.5),
    ("partial_rotary_factor", 1.0),
    ("attention_bias", True),
    ("attention_dropout", 0.1),
    ("logits_scaling", 2.0),
    ("final_logit_softcapping", 5.0),
    ("attn_logit_softcapping", 5.0),
    ("tie_word_embeddings", True),
    ("tie_word_embeddings", False),
    ("pretraining_tp", 2),
    ("num_nextn_predict_layers", 1),
)


def _pick(config: Settings, generator: random.Random, *names: str) -> str | None:
    present = [name for name in names if name in config]
    return generator.choice(present) if present else None


def drop_field(config: Settings, generator: random.Random) -> str:
    name = generator.choice(sorted(config.keys() - _PROVENANCE))
    del config[name]
    return f"{name} is absent"


def null_field(config: Settings, generator: random.Random) -> str:
    name = generator.choice(sorted(config.keys() - _PROVENANCE))
    config[name] = None
    return f"{name} is null"


def spell_number(config: Settings, generator: random.Random) -> str:
    """Write a number as another type of JSON."""
    numbers = [n for n, v in config.items() if type(v) in (int, float, bool)]
    name = generator.choice(sorted(numbers))
    value = config[name]
    if isinstance(value, bool):
        config[name] = int(value)
    elif isinstance(value, int):
        config[name] = generator.choice([float(value), str(value)])
    else:
        config[name] = int(value) if value == int(value) else str(value)
    return f"{name} is {config[name]!r}"


def flip_flag(config: Settings, generator: random.Random) -> str:
    name = generator.choice(sorted(n for n, v in config.items() if isinstance(v, bool)))
    config[name] = not config[name]
    return f"{name} is {config[name]}"


def spell_rope(config: Settings, generator: random.Random) -> str:
    """Scale rotary embeddings, in one of the published spellings."""
    title = generator.choice(sorted(ROPE_SCALINGS))
    kind = title.partition(" ")[0]
    scaling = dict(ROPE_SCALINGS[title])
    type_names = generator.choice([("type",), ("rope_type",), ("type", "rope_type")])
    scaling |= dict.fromkeys(type_names, kind)
    parameters = config.get("rope_parameters") or {}
    theta = parameters.get("rope_theta", config.get("rope_theta", 10000.0))
    where = generator.choice(["rope_scaling", "rope_parameters", "both"])
    if where == "rope_scaling":
        config.pop("rope_parameters", None)
        config["rope_theta"], config["rope_scaling"] = theta, scaling
    elif where == "rope_parameters":
        config["rope_parameters"] = {**scaling, "rope_theta": theta}
    else:
        config["rope_scaling"] = scaling
    return f"{title}, named by {' and '.join(type_names)}, in {where}"


def spell_theta(config: Settings, generator: random.Random) -> str:
    theta = generator.choice([500000.0, 1000, 10000])
    spelling = generator.choice(["flat", "flat beside null", "beside parameters"])
    if spelling != "beside parameters":
        config.pop("rope_parameters", None)
    config["rope_theta"] = theta
    if spelling == "flat beside null":
        config["rope_scaling"] = None
    return f"rope_theta {theta}, {spelling}"


def spell_windows(config: Settings, generator: random.Random) -> str:
    config["sliding_window"] = generator.choice([8, 16, None, 4096])
    switch = generator.choice([True, False, None])
    if switch is not None:
        config["use_sliding_window"] = switch
    layers = config.get("num_hidden_layers") or 2
    kinds = generator.choice(["absent", "full", "sliding", "mixed", "as it was"])
    pattern = {
        "full": ["full_attention"] * layers,
        "sliding": ["sliding_attention"] * layers,
        "mixed": (["sliding_attention", "full_attention"] * layers)[:layers],
    }
    if kinds == "absent":
        config.pop("layer_types", None)
    elif kinds in pattern:
        config["layer_types"] = pattern[kinds]
    return f"sliding_window {config['sliding_window']}, use {switch}, layer_types {kinds}"


def spell_activation(config: Settings, generator: random.Random) -> str:
    name = _pick(config, generator, "hidden_act", "hidden_activation", "activation_function")
    if name is None:
        return ""
    config[name] = generator.choice(ACTIVATIONS)
    return f"{name} is {config[name]}"


def spell_dtype(config: Settings, generator: random.Random) -> str:
    config.pop("dtype", None)
    name = generator.choice(["torch_dtype", "dtype"])
    config[name] = generator.choice(["float32", "bfloat16", "float16", "auto", None])
    return f"{name} is {config[name]}"


def spell_heads(config: Settings, generator: random.Random) -> str:
    name = _pick(config, generator, "num_key_value_heads", "head_dim")
    if name is None:
        return ""
    value = generator.choice(["absent", None, "of one"])
    if value == "absent":
        del config[name]
    elif value is None:
        config[name] = None
    else:
        config[name] = 1 if name == "num_key_value_heads" else 8
    return f"{name} is {value}"


def add_field(config: Settings, generator: random.Random) -> str:
    name, value = generator.choice(ADDED_FIELDS)
    config[name] = value
    return f"{name} is {value!r}"


VARIATIONS: tuple[Variation, ...] = (
    drop_field,
    null_field,
    spell_number,
    flip_flag,
    spell_rope,
    spell_rope,
    spell_theta,
    spell_windows,
    spell_activation,
    spell_dtype,
    spell_heads,
    add_field,
)


def vary(config: Settings, generator: random.Random) -> tuple[Settings, list[str]]:
    """Return a changed copy of ``config``, and descriptions of one or two changes."""
    changed, changes = copy.deepcopy(config), list[str]()
    while len(changes) < generator.choice([1, 1, 2]):
        if change := generator.choice(VARIATIONS)(changed, generator):
            changes.append(change)
    return changed, changes


def numbered(
    configs: dict[str, Settings], number: int
) -> Iterator[tuple[str, Settings, list[str]]]:
    """Yield ``number`` changed configurations, each of the families in turn."""
    names = sorted(configs)
    for index in range(number):
        name = names[index % len(names)]
        yield name, *vary(configs[name], random.Random(index))
