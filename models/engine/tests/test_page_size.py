"""An engine's pages are of a size that all attention backends of a model take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import interposer
from interposer import (
    AttentionEntry,
    AttentionSpec,
    Capability,
    Config,
    Resolver,
    Site,
    Verdict,
    hookimpl,
    place,
)
from interposer_engine import LanguageModel, load, plan
from interposer_ops.attention import common_page_size
from interposer_ops.layers.attention import PagedBackend
from interposer_testing import attention_specs, verify

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 9, [2, 7, 1]]


class Pages32(PagedBackend):
    """Takes pages of 32 and 64 tokens."""

    sizes: tuple[int, ...] = (32, 64)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        if spec.page_size not in cls.sizes:
            return Verdict.refuse(f"takes pages of {cls.sizes}, got {spec.page_size}")
        return spec.judge_plain_decoder()


class Pages64(Pages32):
    """Takes pages of 64 tokens, of decoders that see all."""

    sizes = (64,)

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        if spec.window_tokens is not None:
            return Verdict.refuse("sees all")
        return super().accepts(spec, capability)


class Pages8(Pages64):
    """Takes pages of 8 tokens, of decoders that see all."""

    sizes = (8,)


Add = Callable[..., None]


@pytest.fixture
def add(monkeypatch: pytest.MonkeyPatch) -> Iterator[Add]:
    """Return a function that registers these backends as a plugin, with their scores."""
    module = ModuleType("acme_pages")
    vars(module).update({each.__name__: each for each in (Pages32, Pages64, Pages8)})
    monkeypatch.setitem(sys.modules, "acme_pages", module)
    registrations: list[interposer.Registration] = []

    def add(*backends: type[Pages32], **scores: float) -> None:
        entries = [
            AttentionEntry(
                backend.__name__.lower(),
                f"acme_pages:{backend.__name__}",
                "cpu",
                score=scores.get(backend.__name__, 100.0),
                page_sizes=backend.sizes,
            )
            for backend in backends
        ]
        plugin = ModuleType("acme_pages")
        vars(plugin).update(interposer_records=hookimpl(lambda: entries))
        registrations.append(interposer.register(plugin))

    yield add
    for registration in registrations:
        registration.remove()


def backend_of(lm: LanguageModel) -> str:
    (name,) = {
        choice.chosen.name
        for choice, _ in lm.resolver.choices.values()
        if choice.request.kind == "attention"
    }
    return name


def tokens(lm: LanguageModel) -> list[tuple[int, ...]]:
    return [tuple(done.token_ids) for done in lm.generate(PROMPTS, max_new_tokens=40)]


def test_a_backend_with_pages_of_its_own_serves_a_model(llama: Path, add: Add) -> None:
    config = Config(platform="cpu")
    expected = tokens(load(llama, "float32", config=config, cache_tokens=256))
    add(Pages32)
    lm = load(llama, "float32", config=config, cache_tokens=256)
    assert backend_of(lm) == "pages32"
    assert lm.engine.pool.page_size == 32
    assert tokens(lm) == expected


def test_a_rule_on_backends_decides_before_the_size(llama: Path, add: Add) -> None:
    add(Pages32)
    for rule in ("paged", {"forbid": ["acme_pages/*"]}):
        config = Config(platform="cpu", attention={"decoder": rule})
        assert plan(llama, "float32", config=config).page_size == 16


def sized(*windows: int | None) -> int:
    resolver = Resolver.at(place(Config(platform="cpu")))
    facts: dict[str, Any] = {
        **{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "scale": 1.0, "page_size": 1},
        **{"dtype": torch.float32, "cache_dtype": torch.float32},
    }
    site = Site(resolver, "", torch.float32)
    return common_page_size(
        resolver,
        [
            (AttentionSpec(**facts, window_tokens=window), site.at(f"layers.{index}"))
            for index, window in enumerate(windows)
        ],
    )


def test_the_best_backends_of_all_layers_agree(add: Add) -> None:
    add(Pages32, Pages64, Pages64=200.0)
    assert sized(None) == 64
    assert sized(24) == 32
    assert sized(24, None) == sized(None, 24) == 64


def test_where_the_best_have_no_size_in_common_others_serve(add: Add) -> None:
    add(Pages32, Pages8, Pages8=200.0)
    assert sized(None) == 8
    assert sized(None, 24) == 32


def test_without_wishes_pages_are_of_16_tokens(llama: Path) -> None:
    assert plan(llama, "float32", config=Config(platform="cpu")).page_size == 16


def test_the_kit_tries_the_sizes_of_the_record(add: Add) -> None:
    quick = {spec.page_size for _, spec in attention_specs(quick=True, page_sizes=(32, 64))}
    assert quick == {4, 16, 32, 64}
    add(Pages32)
    report = verify("acme_pages", quick=True, platform="cpu")
    (actual,) = [candidate for candidate in report.candidates if candidate.kind == "attention"]
    assert actual.state == "correct"


@pytest.mark.parametrize("sizes", [[32], (0,), (True,), ("32",)], ids=repr)
def test_sizes_that_are_none_are_refused(sizes: Any) -> None:
    entry = AttentionEntry("wrong", "acme_pages:Pages32", page_sizes=sizes)
    plugin = ModuleType("wrong")
    vars(plugin).update(interposer_records=hookimpl(lambda: [entry]))
    with pytest.raises(
        interposer.errors.PluginError, match="page_sizes that are no tuple of at most 64 ints"
    ):
        interposer.register(plugin)
