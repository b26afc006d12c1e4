"""What is read of a quantization_config means what the library means by it; the rest is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from compressed_tensors.quantization import (  # type: ignore[import-untyped]
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from interposer.errors import ConfigError, UnknownNameError
from interposer_quantization.compressed_tensors_config import Settings


def written(weights: dict[str, Any], targets: list[str] | None = None) -> dict[str, Any]:
    """Return what the library writes for such weights."""
    scheme = QuantizationScheme(
        targets=targets or ["Linear"], weights=QuantizationArgs(**weights), format="int-quantized"
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format="int-quantized",
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    dumped: dict[str, Any] = config.model_dump(mode="json")
    return {"version": "0.20.0", "transform_config": {}, **dumped}


PER_OUTPUT = written({"strategy": "channel"})
GROUPS_OF_32 = written({"strategy": "group", "group_size": 32, "observer": "mse"})
# As releases of 2024 wrote it.
EARLY = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "channel",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": 1.2697642717533653,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "frozen",
}


@pytest.mark.parametrize(
    ("settings_", "inputs_per_scale"), [(PER_OUTPUT, None), (GROUPS_OF_32, 32), (EARLY, None)]
)
def test_settings_of_the_library_are_read(
    settings_: dict[str, Any], inputs_per_scale: int | None
) -> None:
    parsed = Settings.parse(settings_)
    weights = parsed.weights("model.layers.0.mlp.up_proj")
    assert weights is not None
    assert weights.inputs_per_scale == inputs_per_scale
    assert parsed.weights("lm_head") is None


# Where a setting stands, what it is set to, and what the error has to say.
REFUSED: list[tuple[str, Any, str]] = [
    ("format", "pack-quantized", "pack-quantized"),
    ("format", "mixed-precision", "mixed-precision"),
    ("quant_method", "gptq", "gptq"),
    ("quantization_status", "initialized", "initialized"),
    ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
    ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
    ("transform_config", {"config_groups": {}}, "transform_config"),
    ("moe_sparsity_config", {"method": "prune"}, "moe_sparsity_config"),
    ("ignore", ["re:("], "not a regular expression"),
    ("config_groups", {}, "config_groups"),
    ("config_groups", {"W8A16": ["Linear"]}, "W8A16"),
    ("config_groups.group_0.format", "pack-quantized", "pack-quantized"),
    ("config_groups.group_0.targets", ["re:*"], "not a regular expression"),
    ("config_groups.group_0.weights", None, "weights"),
    ("config_groups.group_0.input_activations", {"num_bits": 8}, "input_activations"),
    ("config_groups.group_0.output_activations", {"num_bits": 8}, "output_activations"),
    ("config_groups.group_0.weights.num_bits", 4, "num_bits = 4"),
    ("config_groups.group_0.weights.type", "float", "'float'"),
    ("config_groups.group_0.weights.symmetric", False, "symmetric = False"),
    ("config_groups.group_0.weights.strategy", "tensor", "'tensor'"),
    ("config_groups.group_0.weights.strategy", "block", "'block'"),
    ("config_groups.group_0.weights.strategy", "group", "strategy 'group'"),
    ("config_groups.group_0.weights.strategy", None, "strategy 'tensor'"),
    ("config_groups.group_0.weights.group_size", 32, "group_size 32"),
    ("config_groups.group_0.weights.group_size", 0, "group_size 0"),
    ("config_groups.group_0.weights.dynamic", True, "dynamic = True"),
    ("config_groups.group_0.weights.actorder", "group", "actorder = 'group'"),
    ("config_groups.group_0.weights.block_structure", [128, 128], "block_structure"),
    ("config_groups.group_0.weights.scale_dtype", "torch.uint8", "torch.uint8"),
]


def changed(path: str, value: Any) -> dict[str, Any]:
    edited = copy.deepcopy(PER_OUTPUT)
    *parents, last = path.split(".")
    at = edited
    for parent in parents:
        at = at[parent]
    at[last] = value
    return edited


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_everything_else_is_refused(path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.parse(changed(path, value))
    assert message in str(caught.value)
    assert "Supported: weights of type 'int' with 8 bits, symmetric" in str(caught.value)


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("ignored", "ignore"),
        ("config_groups.group_0.weight", "weights"),
        ("config_groups.group_0.weights.grup_size", "group_size"),
    ],
)
def test_unknown_setting_is_refused_with_the_nearest(path: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match="Known, nearest first") as caught:
        Settings.parse(changed(path, None))
    assert caught.value.known[0] == nearest


@pytest.mark.parametrize("name", ["config_groups", "format", "quantization_status"])
def test_missing_setting_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization_config.{name} = missing"):
        Settings.parse({key: value for key, value in PER_OUTPUT.items() if key != name})


def test_all_problems_are_listed_at_once() -> None:
    edited = changed("config_groups.group_0.weights.num_bits", 4)
    edited["config_groups"]["group_0"]["weights"]["symmetric"] = False
    with pytest.raises(ConfigError, match=r"(?s)num_bits = 4.*symmetric = False"):
        Settings.parse(edited)


def places(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every object in a tree of settings."""
    if isinstance(tree, dict):
        yield path
        for key, value in tree.items():
            yield from places(value, (*path, key))


NAMES = sorted({*Settings.model_fields, *QuantizationScheme.model_fields})
NAMES += sorted({*QuantizationArgs.model_fields, "unknown"})
WORDS = ["int", "float", "channel", "group", "tensor", "token", "weight", "Linear", "lm_head"]
WORDS += ["int-quantized", "naive-quantized", "pack-quantized", "compressed", "frozen", "dense"]
SCALARS = st.none() | st.booleans() | st.integers(-2, 130) | st.floats() | st.sampled_from(WORDS)
VALUES = st.recursive(
    SCALARS | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Return settings of the library with up to three of them removed or set to anything."""
    tree: dict[str, Any] = copy.deepcopy(draw(st.sampled_from([PER_OUTPUT, GROUPS_OF_32, EARLY])))
    for _ in range(draw(st.integers(1, 3))):
        at = tree
        for key in draw(st.sampled_from(list(places(tree)))):
            at = at[key]
        name = draw(st.sampled_from([*at, *NAMES]))
        if draw(st.booleans()):
            at[name] = draw(SCALARS | VALUES)
        else:
            at.pop(name, None)
    return tree


@given(mutated())
@settings(max_examples=400)
def test_settings_are_refused_or_mean_what_the_library_means(tree: dict[str, Any]) -> None:
    parsed = None
    with suppress(ConfigError):
        parsed = Settings.parse(tree)
    if parsed is None:
        return
    library = QuantizationConfig.model_validate(copy.deepcopy(tree))
    assert library.kv_cache_scheme is None
    for name, group in parsed.config_groups.items():
        scheme = library.config_groups[name]
        assert isinstance(scheme, QuantizationScheme)
        assert scheme.input_activations is None
        assert scheme.output_activations is None
        weights = scheme.weights
        assert weights is not None
        assert (weights.num_bits, weights.type, weights.symmetric) == (8, "int", True)
        assert weights.dynamic is False
        size = group.weights.inputs_per_scale
        assert weights.strategy == ("channel" if size is None else "group")
        assert size is None or size == weights.group_size


class Tiny(nn.Module):
    """Layers of a few names for the library to match."""

    def __init__(self) -> None:
        super().__init__()
        names = ("q_proj", "k_proj", "fc1")
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(48, 48, device="meta") for name in names})
            for _ in range(2)
        )
        self.lm_head = nn.Linear(48, 48, device="meta")


PATTERNS = st.sampled_from(
    [
        "Linear",
        "Module",
        "Embedding",
        "lm_head",
        "layers.0.q_proj",
        "layers.1.k_proj",
        "q_proj",
        "re:.*q_proj",
        "re:.*[qk]_proj$",
        r"re:layers\.1",
        "re:q_proj",
        "re:.*",
    ]
)


@given(
    targets=st.lists(st.lists(PATTERNS, min_size=1, max_size=3), min_size=1, max_size=3),
    ignore=st.lists(PATTERNS, max_size=2),
)
@settings(max_examples=200)
def test_layers_are_matched_as_the_library_matches_them(
    targets: list[list[str]], ignore: list[str]
) -> None:
    tree = copy.deepcopy(PER_OUTPUT)
    sizes = (8, 12, 16)
    tree["ignore"] = ignore
    tree["config_groups"] = {
        f"group_{number}": {
            "targets": names,
            "weights": {"strategy": "group", "group_size": sizes[number]},
        }
        for number, names in enumerate(targets)
    }
    parsed = Settings.parse(tree)
    model = Tiny()
    apply_quantization_config(model, QuantizationConfig(**tree), show_progress=False)
    linears = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    assert len(linears) == 7
    for name, module in linears:
        scheme = getattr(module, "quantization_scheme", None)
        weights = parsed.weights(name)
        found = weights and weights.inputs_per_scale
        assert found == (scheme and scheme.weights.group_size), name
