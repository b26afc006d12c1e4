"""lm_heads and tied embeddings that become integers while a model loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from interposer import Config, Resolver, Site, current_registry, explain, place
from interposer.errors import CheckpointError, ConfigError
from interposer_engine import LanguageModel, load, plan
from interposer_ops.layers.embedding import Embedding, LMHead, PlainEmbedding
from interposer_ops.layers.linear import PlainLinear
from interposer_quantization._online.fp8 import OnlineFp8
from interposer_quantization._online.integers import OnlineInt4

MODEL = Path(__file__).parents[2] / "examples/models/stdlib-lm"
WEIGHTS = "model.safetensors"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TEXT = "import os\nimport sys\n\n\ndef main(path: str) -> int:\n    "
# Linear layers stay plain, so that the head alone differs.
ALONE: dict[str, Any] = {"quant_method": "int4", "modules_to_not_convert": ["_proj"]}
REFERENCES = Config(canary="off", kernels={"*": "reference"})
HEADS: list[dict[str, Any]] = [
    {"head": "int8"},
    {"head": "int8", "head_group_size": 32},
    {"head": "int4"},
    {"head": "int4", "head_group_size": 128},
]
ROUNDED: list[dict[str, Any]] = [
    {"head": "int8", "head_activations": "int8"},
    {"head": "int4", "head_activations": "int8"},
    {"head": "int4", "head_group_size": 128, "head_activations": "int8"},
]

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the shipped model with other tensors."""

    def written(name: str, tied: bool = True, **tensors: torch.Tensor) -> Path:
        path = tmp_path / name
        path.mkdir()
        facts = json.loads((MODEL / "config.json").read_text())
        facts |= {"tie_word_embeddings": tied, "dtype": "float32"}
        (path / "config.json").write_text(json.dumps(facts))
        shutil.copy(MODEL / "tokenizer.json", path)
        stored = {name: value.float() for name, value in load_file(MODEL / WEIGHTS).items()}
        save_file(stored | tensors, path / WEIGHTS)
        return path

    return written


def nearest(weight: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
    """Return the dequantized weight of a quantized head, computed here a second time."""
    bits = 8 if settings["head"] == "int8" else 4
    size = settings.get("head_group_size") or (weight.shape[1] if bits == 8 else 32)
    groups = weight.float().unflatten(1, (-1, size))
    scale = (groups.abs().amax(-1, keepdim=True) * 2 / (2**bits - 1)).bfloat16().float()
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (groups / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    rounded: torch.Tensor = (codes * scale).flatten(1)
    return rounded


def parts(lm: LanguageModel) -> tuple[Embedding, LMHead]:
    embedding, head = lm.engine.model.model.embed_tokens, lm.engine.model.lm_head
    assert isinstance(embedding, Embedding)
    assert isinstance(head, LMHead)
    return embedding, head


@pytest.mark.landing(1)
@pytest.mark.parametrize("settings", HEADS, ids=str)
def test_tied_model_computes_with_the_dequantized_table(
    write: Write, settings: dict[str, Any]
) -> None:
    table = nearest(load_file(MODEL / WEIGHTS)[TABLE], settings)
    wanted = load(write("wanted", **{TABLE: table}), "float32", cache_tokens=256)
    lm = load(MODEL, "float32", cache_tokens=256, quantization={**ALONE, **settings})
    token_ids = lm.tokenizer.encode(TEXT)
    assert torch.equal(parts(lm)[0](torch.tensor(token_ids)), table[token_ids])
    torch.testing.assert_close(lm.logits(token_ids), wanted.logits(token_ids), rtol=0, atol=2e-4)
    actual, expected = (
        model.generate(TEXT, max_new_tokens=24, temperature=0.0)[0].token_ids
        for model in (lm, wanted)
    )
    assert actual == expected


@pytest.mark.landing(1)
@pytest.mark.parametrize("settings", HEADS, ids=str)
def test_untied_lm_head_is_quantized_and_the_embedding_stays_plain(
    write: Write, settings: dict[str, Any]
) -> None:
    table = load_file(MODEL / WEIGHTS)[TABLE].float()
    own = 1.5 * table.flip(0)
    plain = write("plain", tied=False, **{HEAD: own})
    expected = load(
        write("wanted", tied=False, **{HEAD: nearest(own, settings)}), "float32", cache_tokens=256
    )
    lm = load(plain, "float32", cache_tokens=256, quantization={**ALONE, **settings})
    embedding, head = parts(lm)
    assert isinstance(embedding.method, PlainEmbedding)
    assert not isinstance(head.method, PlainLinear)
    token_ids = lm.tokenizer.encode(TEXT)
    torch.testing.assert_close(lm.logits(token_ids), expected.logits(token_ids), rtol=0, atol=3e-4)


@pytest.mark.landing(1)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("settings", ROUNDED, ids=str)
def test_head_activations_quantizes_inputs_of_the_lm_head(
    write: Write, settings: dict[str, Any], tied: bool
) -> None:
    own = load_file(MODEL / WEIGHTS)[TABLE].float()
    path = write("plain", tied=tied, **({} if tied else {HEAD: own}))
    quantization = {**ALONE, **settings}
    lm = load(path, "float32", cache_tokens=256, quantization=quantization, config=REFERENCES)
    quantization.pop("head_activations")
    plain = load(path, "float32", cache_tokens=256, quantization=quantization, config=REFERENCES)
    token_ids = lm.tokenizer.encode(TEXT)
    hidden = hidden_states(plain, token_ids)
    assert torch.equal(hidden_states(lm, token_ids), hidden)
    scale = (hidden.abs().amax(-1, keepdim=True) / 127).double()
    rounded = (hidden.double() / scale).round() * scale
    expected = rounded @ nearest(own, settings).double().T
    actual = lm.logits(token_ids)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=2e-4)
    # It matters: what was rounded is nearer than what was not.
    assert (actual - plain.logits(token_ids)).abs().max() > 2e-3


def hidden_states(lm: LanguageModel, token_ids: list[int]) -> torch.Tensor:
    """Return the hidden states that the head multiplies for ``token_ids``, float32."""
    observed: list[torch.Tensor] = []
    hook = parts(lm)[1].register_forward_pre_hook(lambda _, given: observed.append(given[0]))
    lm.logits(token_ids)
    hook.remove()
    return torch.cat(observed).float()


@pytest.mark.landing(2)
@pytest.mark.parametrize("settings", ROUNDED, ids=str)
def test_tied_table_has_one_copy_with_quantized_inputs_too(settings: dict[str, Any]) -> None:
    rows = [
        row
        for row in explain(MODEL, quantization={**ALONE, **settings}).rows
        if row.choice.request.kind == "kernel"
        and {"lm_head", "model.embed_tokens"} & {*row.prefixes}
    ]
    forms = {
        getattr(row.choice.chosen.record, "form", "")
        for row in rows
        if row.choice.request.name.endswith(("_embedding", "_linear"))
    }
    assert len(rows) == 4
    assert len(forms) == 1
    embedding, last = built({"quant_method": "online_fp8", **settings}, torch.randn(96, 256))
    assert embedding.constants[0] is last.operands[0]
    assert embedding.constants[1] is last.operands[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_rounded_once_to_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    for settings in ({"head": "int8"}, {"head": "int4"}):
        embedding, _ = built({"quant_method": "online_int4", **settings}, weight)
        expected = nearest(weight, settings)
        rows = torch.tensor([69, 0, 7, 7])
        assert torch.equal(embedding(rows), expected[rows].to(dtype))


def built(settings: dict[str, Any], weight: torch.Tensor) -> tuple[Embedding, LMHead]:
    """Return layers of references that hold ``weight``."""
    fp8 = settings["quant_method"] == "online_fp8"
    scheme = OnlineFp8.parse(settings) if fp8 else OnlineInt4.parse(settings)
    resolver = Resolver(current_registry(), place().device, REFERENCES, scheme)
    site = Site(resolver, "", weight.dtype)
    at = site.at("lm_head")
    vocab_size, hidden_size = weight.shape
    embedding = Embedding(site.at("embed_tokens"), vocab_size, hidden_size, at)
    head = LMHead(at, vocab_size, hidden_size, tied=embedding)
    embedding.get_parameter("weight").data.copy_(weight)
    embedding.finalize()
    head.finalize()
    return embedding, head


@pytest.mark.parametrize(
    ("head", "num_bytes"), [("int8", 96 * 64 + 96 * 4), ("int4", 96 * 32 + 96 * 2 * 4)]
)
def test_lookup_and_head_share_one_quantized_table(head: str, num_bytes: int) -> None:
    embedding, last = built({"quant_method": "online_fp8", "head": head}, torch.randn(96, 64))
    assert embedding.constants[0] is last.operands[0]
    assert [*embedding.parameters(), *last.parameters()] == []
    kept_tensors = {
        each.data_ptr(): each.nbytes
        for each in (*embedding.constants, *last.operands)
        if isinstance(each, torch.Tensor)
    }
    assert sum(kept_tensors.values()) == num_bytes


def test_method_returns_the_dequantized_table() -> None:
    weight = torch.randn(33, 64, generator=torch.Generator().manual_seed(3))
    for settings in HEADS[:3]:
        scheme = OnlineInt4.parse({"quant_method": "online_int4", **settings})
        resolver = Resolver(current_registry(), place().device, REFERENCES, scheme)
        at = Site(resolver, "table", torch.float32)
        layer = Embedding(at, 33, 64, at.at("lm_head"))
        layer.get_parameter("weight").data.copy_(weight)
        stated = layer.method.dequantized(layer)
        assert stated is not None
        assert torch.equal(stated, nearest(weight, settings).double())


@pytest.mark.landing(3)
@pytest.mark.parametrize(
    ("asked", "ops"),
    [
        ("int4", {"quantize_weight_int8", "w8a16_embedding", "w8a16_linear"}),
        (
            {"quant_method": "fp8", "head": "int4"},
            {"quantize_weight_int4", "w4a16_embedding", "w4a16_linear"},
        ),
        (
            {"quant_method": "fp8", "head_activations": "int8"},
            {"quantize_weight_int8", "quantize_int8_per_token", "w8a16_embedding", "int8_linear"},
        ),
        (
            {"quant_method": "int8", "head": "int4", "head_activations": "int8"},
            {"quantize_weight_int4", "quantize_int8_per_token", "w4a16_embedding", "w4a8_linear"},
        ),
        ({"quant_method": "int4", "head": "plain"}, {"embedding", "linear"}),
        ({"quant_method": "int8", "modules_to_not_convert": ["lm_head"]}, {"embedding", "linear"}),
    ],
)
def test_explain_names_the_format_of_the_head(asked: Any, ops: set[str]) -> None:
    places = {"lm_head", "model.embed_tokens"}
    actual = {
        row.choice.request.name
        for row in explain(MODEL, quantization=asked).rows
        if row.choice.request.kind == "kernel" and places & set(row.prefixes)
    }
    assert actual == ops


def test_head_uses_the_group_size_of_the_linear_layers() -> None:
    def size(**settings: Any) -> object:
        rows = explain(MODEL, quantization={"quant_method": "int4", **settings}).rows
        (actual,) = [row for row in rows if row.choice.request.name.endswith("a16_embedding")]
        return actual.choice.request.dims["group_size"]

    assert size(head="int4") == 32
    assert size(head="int4", group_size=16) == 16
    assert size(head="int4", group_size=16, head_group_size=64) == 64
    assert size(head="int8", group_size=16) == 256


@pytest.mark.landing(2)
@pytest.mark.parametrize("head", [{"head": "int8"}, {"head": "int4"}, *ROUNDED[:2]], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updated_table_is_quantized_in_place(
    write: Write, head: dict[str, Any], dtype: str
) -> None:
    table = 1.25 * load_file(MODEL / WEIGHTS)[TABLE].float().flip(1)
    settings = {**ALONE, **head}
    expected = load(
        write("wanted", **{TABLE: table}), dtype, cache_tokens=64, quantization=settings
    )
    lm = load(MODEL, dtype, cache_tokens=64, quantization=settings)
    token_ids = lm.tokenizer.encode(TEXT)
    operands = parts(lm)[1].operands
    assert not torch.equal(lm.logits(token_ids), expected.logits(token_ids))
    assert lm.update_weights({TABLE: table}) == ()
    assert torch.equal(lm.logits(token_ids), expected.logits(token_ids))
    assert all(one is other for one, other in zip(operands, parts(lm)[1].operands, strict=True))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"head": "plain", "head_group_size": 32}, "head 'plain' has no head_group_size 32"),
        ({"head": "int4", "head_group_size": 24}, r"embed_tokens: groups of 24 do not divide"),
        ({"head": "plain", "head_activations": "int8"}, "head 'plain' has no head_activations"),
        ({"head_group_size": 32, "head_activations": "int8"}, "one scale for each row, no head_gr"),
        ({"head_activations": "fp8"}, "head_activations = 'fp8'"),
        (
            {"modules_to_not_convert": ["lm_head"], "head": "int4", "head_activations": "int8"},
            "excludes lm_head, but these settings .*: 'head', 'head_activations'",
        ),
        (
            {"modules_to_not_convert": ["embed_tokens"], "head_group_size": 32},
            "excludes model.embed_tokens, but these settings .*: 'head_group_size'",
        ),
        ({"head": "nvfp4"}, r"head = 'nvfp4'"),
        ({"head_group_size": 0}, "head_group_size = 0"),
    ],
)
def test_invalid_settings_are_refused_before_weights_are_read(
    settings: dict[str, Any], message: str
) -> None:
    for method in ("int4", "fp8"):
        with pytest.raises(ConfigError, match=message):
            plan(MODEL, quantization={"quant_method": method, **settings})


def test_odd_rows_of_four_bits_are_refused() -> None:
    settings = {"quant_method": "online_int4", "head": "int4", "head_group_size": 11}
    with pytest.raises(ConfigError, match="rows of 33 numbers of 4 bits do not fill bytes"):
        built(settings, torch.zeros(8, 33))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_table_that_is_not_finite_is_refused_with_its_name(value: float) -> None:
    weight = torch.randn(64, 32)
    weight[9, 3] = value
    with pytest.raises(CheckpointError, match=rf"embed_tokens\.weight: holds {value}, which"):
        built({"quant_method": "online_int4"}, weight)
