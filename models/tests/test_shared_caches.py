"""Layers that attend to the cache of an earlier layer: one cache, which they do not write."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from models.conftest import example, write_checkpoint
from models.tests.test_parity import greedy_of, logits_of

from interposer import AttentionEntry, Config, explain, hookimpl, register
from interposer.errors import CheckpointError, ConfigError
from interposer_engine import LanguageModel, load, plan
from interposer_engine.parts import decoder_of
from interposer_models._families import examples
from interposer_models._families.gemma4 import Gemma4
from interposer_ops.layers.attention import PagedBackend

PROMPTS = [[(5 * i) % 256 for i in range(60)], [7] * 9]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny Gemma 4 whose last three layers of six read caches, and transformers' own of it."""
    path = tmp_path_factory.mktemp("gemma4")
    model = write_checkpoint(example(examples.gemma4, "shared"), path)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.5, 1.5)
    model.save_pretrained(path)
    return path, model


@pytest.fixture(scope="module")
def gemma4(pair: tuple[Path, Any]) -> Path:
    return pair[0]


@pytest.fixture(scope="module")
def lm(gemma4: Path) -> LanguageModel:
    return load(gemma4, "float32", platform="cpu", cache_tokens=256)


def tokens(lm: LanguageModel) -> list[tuple[int, ...]]:
    return [tuple(c.token_ids) for c in lm.generate(PROMPTS, max_new_tokens=20, ignore_eos=True)]


def test_shared_caches_are_allocated_once(lm: LanguageModel) -> None:
    model = lm.engine.model
    assert len(model.attention_layers) == len(lm.engine.runner.caches) == 3
    # Of windows, without, with; the last of each kind that writes is read from then on.
    assert model.model.cache_indices == [0, 1, 2, 1, 2, 1]
    readers = [block.self_attn.attn for block in model.model.layers[3:]]
    assert [reader.cache_writer[0] for reader in readers] == [
        model.attention_layers[i] for i in (1, 2, 1)
    ]
    assert all(reader.backend is reader.cache_writer[0].backend for reader in readers)


def test_chunked_prefill_and_decode_match_transformers(pair: tuple[Path, Any]) -> None:
    path, model = pair
    small = load(path, "float32", platform="cpu", cache_tokens=112, max_step_tokens=17)
    assert tokens(small) == [tuple(greedy_of(model, prompt, 20)) for prompt in PROMPTS]
    difference = small.logits(PROMPTS[0]) - logits_of(model, PROMPTS[0])
    assert difference.abs().max() <= 1e-4


def test_the_cache_budget_measures_layers_that_read_caches(gemma4: Path, lm: LanguageModel) -> None:
    measured = load(gemma4, "float32", platform="cpu", memory_fraction=0.001, max_sequences=2)
    assert tokens(measured) == tokens(lm)
    with pytest.raises(ConfigError, match="builds a Gemma4LM whose blocks need each other"):
        decoder_of(plan(gemma4))


class Unaware(PagedBackend):
    """Asks for no feature, and knows nothing of shared caches."""

    @classmethod
    def accepts(cls, spec: Any, capability: Any) -> Any:
        return PagedBackend.accepts(spec, capability)

    def forward(self, *step: Any) -> Any:  # type: ignore[override]
        return super().forward(*step)


def test_a_backend_that_cannot_read_stored_keys_is_refused(
    gemma4: Path, lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = ModuleType("acme_unaware")
    module.Unaware = Unaware
    monkeypatch.setitem(sys.modules, "acme_unaware", module)
    entry = AttentionEntry("unaware", "acme_unaware:Unaware", "cpu", score=100.0)
    plugin: Any = ModuleType("acme_unaware")
    plugin.interposer_records = hookimpl(lambda: [entry])
    with register(plugin):
        unaware_lm = load(gemma4, "float32", config=Config(platform="cpu"), cache_tokens=256)
    assert tokens(unaware_lm) == tokens(lm)
    (backend,) = {type(backend) for backend in unaware_lm.engine.runner.backends}
    assert backend is not Unaware
    explanation = str(explain(unaware_lm).why("decoder"))
    assert "unaware" in explanation
    assert "its forward takes no 'stored'" in explanation


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_kv_shared_layers": 5}, "no earlier layer with the same window and heads"),
        ({"enable_moe_block": True}, "experts of Gemma 4 are not computed"),
        ({"use_bidirectional_attention": "all"}, "'all', which is not supported"),
        (
            {"per_layer_config": {"3": {"head_dim": 8}}},
            "no earlier layer with the same window and heads",
        ),
        ({"per_layer_config": {"1": {"head_dim": -1}}}, "greater than 0"),
    ],
)
def test_unsupported_fields_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        Gemma4.parse({**examples.gemma4()["shared"], **fields}, "config.json")


def test_heads_are_stated_by_kind_or_by_layer() -> None:
    settings = Gemma4.parse(examples.gemma4()["apart"], "config.json")
    by_layer = {str(i): {"head_dim": 32, "num_key_value_heads": 1} for i in (1, 3, 5)}
    fields = {**examples.gemma4()["apart"], "per_layer_config": by_layer, "global_head_dim": 8}
    assert [settings.heads(i) for i in range(6)] == [
        Gemma4.parse(fields, "config.json").heads(i) for i in range(6)
    ]
    released = Gemma4.parse({**fields, "layer_types": None, "rope_parameters": None}, "config.json")
    assert released.windows == (24, 24, 24, 24, 24, None)
    assert released.rotation(5)[1]["rope_type"] == "proportional"
