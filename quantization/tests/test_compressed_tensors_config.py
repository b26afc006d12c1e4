"""Fields of a quantization_config mean what the library means by them, or are refused."""

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
    preset_name_to_scheme,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.landing import num_examples
from torch import nn

from interposer.errors import ConfigError, UnknownNameError
from interposer_quantization._compressed_tensors.config import Settings


def written(
    weights: dict[str, Any],
    inputs: dict[str, Any] | None = None,
    form: str = "int-quantized",
) -> dict[str, Any]:
    """Return the quantization config that the library writes for such weights and inputs."""
    activations = None if inputs is None else QuantizationArgs(**inputs)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=activations,
        format=form,
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        format=form,
        quantization_status="compressed",
        ignore=["lm_head"],
    )
    dumped: dict[str, Any] = config.model_dump(mode="json")
    return {"version": "0.20.0", "transform_config": {}, **dumped}


def preset(name: str, form: str) -> dict[str, Any]:
    """Return the library's config of a scheme by its name."""
    scheme = preset_name_to_scheme(name, ["Linear"])
    inputs = scheme.input_activations
    arguments = [args and args.model_dump(exclude_none=True) for args in (scheme.weights, inputs)]
    return written(arguments[0], arguments[1], form)


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


# The library's names of schemes, the format that it stores them in, and what is said of them.
PRESETS = {
    ("W4A16", "pack-quantized"): "int4 per group of 128 inputs (pack-quantized)",
    ("W4A16_ASYM", "pack-quantized"): ("int4 per group of 128 inputs, asymmetric (pack-quantized)"),
    ("W8A16", "pack-quantized"): "int8 per group of 128 inputs (pack-quantized)",
    ("W3A16", "pack-quantized"): "int3 per group of 128 inputs (pack-quantized)",
    ("W4A8", "int-quantized"): (
        "int4 per group of 128 inputs, inputs int8 per token (int-quantized)"
    ),
    ("W4AFP8", "pack-quantized"): (
        "int4 per group of 128 inputs, inputs float8 per token (pack-quantized)"
    ),
    ("W8A8", "int-quantized"): "int8 per output, inputs int8 per token (int-quantized)",
    ("FP8", "float-quantized"): (
        "float8 with one scale, inputs float8 with one scale that is stored (float-quantized)"
    ),
    ("FP8_DYNAMIC", "float-quantized"): (
        "float8 per output, inputs float8 per token (float-quantized)"
    ),
    ("FP8_BLOCK", "float-quantized"): (
        "float8 per block of 128 by 128, inputs float8 per group of 128 inputs (float-quantized)"
    ),
    ("NVFP4A16", "nvfp4-pack-quantized"): "float4 per group of 16 inputs (nvfp4-pack-quantized)",
    ("NVFP4", "nvfp4-pack-quantized"): (
        "float4 per group of 16 inputs, inputs float4 per group of 16 inputs (nvfp4-pack-quantized)"
    ),
    ("MXFP4A16", "mxfp4-pack-quantized"): "float4 per group of 32 inputs (mxfp4-pack-quantized)",
    ("MXFP4", "mxfp4-pack-quantized"): (
        "float4 per group of 32 inputs, inputs float4 per group of 32 inputs (mxfp4-pack-quantized)"
    ),
    ("MXFP4XFP8", "mxfp4-pack-quantized"): (
        "float4 per group of 32 inputs, inputs float8 per group of 128 inputs "
        "(mxfp4-pack-quantized)"
    ),
    ("MXFP8A16", "mxfp8-quantized"): "float8 per group of 32 inputs (mxfp8-quantized)",
    ("MXFP8", "mxfp8-quantized"): (
        "float8 per group of 32 inputs, inputs float8 per group of 32 inputs (mxfp8-quantized)"
    ),
}


@pytest.mark.parametrize(("name", "form"), PRESETS)
def test_preset_schemes_of_compressed_tensors_are_read(name: str, form: str) -> None:
    parsed = Settings.parse(preset(name, form))
    assert str(parsed.stored("model.layers.0.mlp.up_proj")) == PRESETS[name, form]
    assert parsed.stored("lm_head") is None


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("W4A4", "int-quantized", "no op quantizes inputs to int4 per token"),
        ("MXFP6A16", "mxfp6-pack-quantized", "mxfp6-pack-quantized"),
        ("W4A16", "float-quantized", "does not store weights of int4 per group of 128 inputs"),
        (
            "FP8",
            "pack-quantized",
            "'pack-quantized' does not store weights of float8 with one scale",
        ),
        ("NVFP4", "mxfp4-pack-quantized", "the format 'mxfp4-pack-quantized' does not store"),
    ],
)
def test_schemes_without_an_op_are_refused(name: str, form: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings.parse(preset(name, form))


@pytest.mark.parametrize(
    ("settings_", "inputs_per_scale"), [(PER_OUTPUT, None), (GROUPS_OF_32, 32), (EARLY, None)]
)
def test_settings_of_the_library_are_read(
    settings_: dict[str, Any], inputs_per_scale: int | None
) -> None:
    stored = Settings.parse(settings_).stored("model.layers.0.mlp.up_proj")
    assert stored is not None
    assert stored.weights.inputs_per_scale == inputs_per_scale
    assert stored.inputs is None


def test_each_config_group_may_have_its_own_format() -> None:
    mixed = {**PER_OUTPUT, "format": "mixed-precision"}
    mixed["config_groups"] = {
        "group_0": PER_OUTPUT["config_groups"]["group_0"] | {"targets": ["re:.*mlp.*"]},
        "group_1": preset("FP8_DYNAMIC", "float-quantized")["config_groups"]["group_0"],
        "group_2": {"targets": ["re:.*o_proj"]},
    }
    parsed = Settings.parse(mixed)
    stored = {name: parsed.stored(name) for name in ("mlp.up_proj", "attn.q_proj", "attn.o_proj")}
    assert [how and how.form for how in stored.values()] == [
        "int-quantized",
        "float-quantized",
        None,
    ]
    del mixed["config_groups"]["group_1"]["format"]
    with pytest.raises(
        ConfigError, match=r"config_groups\.group_1: the format is 'mixed-precision'"
    ):
        Settings.parse(mixed)


GROUP_0, WEIGHTS = "config_groups.group_0", "config_groups.group_0.weights"
STATIC = {"num_bits": 8, "strategy": "tensor"}
# Where a setting stands, what it is set to, and what the error has to say.
REFUSED: list[tuple[str, Any, str]] = [
    ("format", "marlin-24", "marlin-24"),
    ("format", "dense", "dense"),
    ("quant_method", "gptq", "gptq"),
    ("quantization_status", "initialized", "initialized"),
    ("kv_cache_scheme", {"num_bits": 4}, "kv_cache_scheme.num_bits = 4"),
    ("kv_cache_scheme", {"type": "int", "symmetric": False}, "kv_cache_scheme.symmetric = False"),
    ("kv_cache_scheme", {"type": "int", "dynamic": True}, "kv_cache_scheme.dynamic = True"),
    ("kv_cache_scheme", {"type": "float", "num_bits": 4}, "kv_cache_scheme.num_bits = 4"),
    ("kv_cache_scheme", {"type": "float", "dynamic": True}, "kv_cache_scheme.dynamic = True"),
    ("kv_cache_scheme", {"type": "float", "strategy": "token"}, "kv_cache_scheme.strategy"),
    (WEIGHTS, {"num_bits": 8, "strategy": "attn_head"}, f"{WEIGHTS}.strategy = 'attn_head'"),
    ("kv_cache_scheme", {"type": "float", "group_size": 16}, "a cache takes 'tensor'"),
    ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config"),
    ("transform_config", {"config_groups": {}}, "transform_config"),
    ("moe_sparsity_config", {"method": "prune"}, "moe_sparsity_config"),
    ("ignore", ["re:("], "not a regular expression"),
    ("config_groups", {}, "config_groups"),
    ("config_groups", {"W8A16": ["Linear"]}, "W8A16"),
    (f"{GROUP_0}.format", "marlin-24", "marlin-24"),
    (f"{GROUP_0}.format", "dense", "format 'dense' stores no quantized weights"),
    (f"{GROUP_0}.format", "mixed-precision", "mixed-precision"),
    (f"{GROUP_0}.targets", ["re:*"], "not a regular expression"),
    (f"{GROUP_0}.output_activations", {"num_bits": 8}, "output_activations"),
    (f"{GROUP_0}.input_activations", {"num_bits": 7}, "no op quantizes inputs to int7"),
    (f"{GROUP_0}.input_activations", {"strategy": "token"}, "strategy 'token' with dynamic False"),
    (f"{GROUP_0}.input_activations", {"strategy": "channel"}, "strategy 'channel'"),
    (f"{GROUP_0}.input_activations", {"dynamic": True}, "no op quantizes inputs to int8 with one"),
    (f"{GROUP_0}.input_activations", {"dynamic": "local"}, "dynamic 'local'"),
    (f"{GROUP_0}.input_activations", {"type": "float"}, "by weights of int8 per output"),
    (f"{WEIGHTS}.num_bits", 9, "num_bits = 9"),
    (f"{WEIGHTS}.num_bits", 0, "num_bits = 0"),
    (f"{WEIGHTS}.type", "float", "does not store weights of float8 per output"),
    (f"{WEIGHTS}.type", "uint", "'uint'"),
    (f"{WEIGHTS}.strategy", "block", "'block' takes rows and columns"),
    (f"{WEIGHTS}.strategy", "token", "int8 per token"),
    (f"{WEIGHTS}.strategy", "group", "strategy 'group'"),
    (f"{WEIGHTS}.group_size", 32, "group_size 32"),
    (f"{WEIGHTS}.group_size", 0, "group_size 0"),
    (f"{WEIGHTS}.dynamic", True, "dynamic = True"),
    (f"{WEIGHTS}.actorder", True, "actorder = True"),
    (f"{WEIGHTS}.block_structure", [128, 128], "block_structure [128, 128]"),
    (f"{WEIGHTS}.scale_dtype", "torch.uint8", "torch.uint8"),
    (f"{WEIGHTS}.scale_dtype", "torch.float8_e4m3fn", "torch.float8_e4m3fn"),
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
    assert "Supported: the formats 'pack-quantized', " in str(caught.value)


@pytest.mark.parametrize(
    ("path", "nearest"),
    [
        ("ignored", "ignore"),
        ("config_groups.group_0.weight", "weights"),
        ("config_groups.group_0.weights.grup_size", "group_size"),
    ],
)
def test_unknown_setting_is_refused_with_the_nearest_name(path: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match="Known, nearest first") as caught:
        Settings.parse(changed(path, None))
    assert caught.value.known[0] == nearest


@pytest.mark.parametrize("name", ["input_activations", "kv_cache_scheme"])
def test_unknown_setting_inside_a_group_is_refused(name: str) -> None:
    within = "config_groups.group_0.input_activations" if name != "kv_cache_scheme" else name
    with pytest.raises(UnknownNameError, match=rf"in quantization_config\.{within}") as caught:
        Settings.parse(changed(within, {"symetric": True, "type": "float"}))
    assert caught.value.known[0] == "symmetric"


@pytest.mark.parametrize("name", ["config_groups", "format", "quantization_status"])
def test_missing_setting_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization_config.{name} = missing"):
        Settings.parse({key: value for key, value in PER_OUTPUT.items() if key != name})


def test_all_problems_are_listed_at_once() -> None:
    edited = changed("config_groups.group_0.weights.num_bits", 9)
    edited["config_groups"]["group_0"]["weights"]["symmetric"] = "no"
    with pytest.raises(ConfigError, match=r"(?s)num_bits = 9.*symmetric = 'no'"):
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
WORDS += ["float-quantized", "mixed-precision", "block", "tensor_group", "local", "torch.uint8"]
SCALARS = st.none() | st.booleans() | st.integers(-2, 130) | st.floats() | st.sampled_from(WORDS)
VALUES = st.recursive(
    SCALARS | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
TREES = [PER_OUTPUT, GROUPS_OF_32, EARLY, *(preset(*names) for names in PRESETS)]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """Return settings of the library with up to three of them removed or set to anything."""
    tree: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(TREES)))
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


def facts(args: Any) -> tuple[Any, ...]:
    """Return the type, bits, symmetry, strategy and size that the library reads."""
    size = (1, args.group_size) if args.strategy in ("group", "tensor_group") else None
    if args.block_structure is not None:
        size = tuple(args.block_structure)
    return args.type, args.num_bits, args.symmetric, args.strategy, size


@given(mutated())
@settings(max_examples=num_examples(400))
@pytest.mark.filterwarnings("ignore:Using GROUP strategy for both:UserWarning")
def test_settings_are_refused_or_match_compressed_tensors(tree: dict[str, Any]) -> None:
    parsed = None
    with suppress(ConfigError):
        parsed = Settings.parse(tree)
    if parsed is None:
        return
    library = QuantizationConfig.model_validate(copy.deepcopy(tree))
    assert (library.kv_cache_scheme is None) == (parsed.kv_cache_scheme is None)
    for name, group in parsed.config_groups.items():
        scheme = library.config_groups[name]
        assert isinstance(scheme, QuantizationScheme)
        assert scheme.output_activations is None
        stored, inputs = group.stored(parsed.format), scheme.input_activations
        if stored is None:
            assert scheme.weights is None
            continue
        assert stored.form == (scheme.format or library.format)
        actual = stored.weights
        assert facts(scheme.weights) == (
            actual.kind,
            actual.bits,
            actual.symmetric,
            actual.strategy,
            actual.size,
        )
        assert scheme.weights.dynamic is False
        if stored.inputs is None:
            assert inputs is None
            continue
        kind, bits, symmetric, strategy, size = facts(inputs)
        # One scale for all tokens of a batch is replaced by one for each.
        each = strategy == "tensor" and inputs.dynamic
        assert (kind, bits, symmetric, "token" if each else strategy, size) == (
            stored.inputs.kind,
            stored.inputs.bits,
            stored.inputs.symmetric,
            stored.inputs.strategy,
            stored.inputs.size,
        )
        assert stored.inputs.static == (inputs.dynamic is False)


def test_actorder_of_early_releases_is_read() -> None:
    packed = preset("W4A16", "pack-quantized")
    for order, reordered in (("group", True), ("dynamic", True), ("weight", False), (False, False)):
        packed["config_groups"]["group_0"]["weights"]["actorder"] = order
        stored = Settings.parse(packed).stored("fc")
        assert stored is not None
        assert stored.weights.reordered is reordered


def test_dense_sparsity_of_early_releases_is_ignored() -> None:
    sparsity = {"format": "dense", "global_sparsity": 0.1, "sparsity_structure": "unstructured"}
    sparsity |= {"ignore": [], "targets": [], "registry_requires_subclass": False}
    assert Settings.parse({**PER_OUTPUT, "sparsity_config": sparsity}).stored("fc") is not None
    with pytest.raises(UnknownNameError, match="global_sparsity"):
        Settings.parse({**PER_OUTPUT, "sparsity_config": {"format": "dense", "global_sprsity": 1}})


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
@settings(max_examples=num_examples(200))
def test_target_matching_follows_compressed_tensors(
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
        stored = parsed.stored(name)
        actual = stored and stored.weights.inputs_per_scale
        assert actual == (scheme and scheme.weights.group_size), name
