"""The families of models: the conformance suite, and what their records say of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import AliasChoices
from transformers import Phi3Config, Phi3ForCausalLM

from interposer import (
    AttentionSpec,
    CausalModel,
    Config,
    ModelFamily,
    Rule,
    Site,
    current_registry,
    explain,
    hookimpl,
    register,
)
from interposer.errors import (
    CheckpointError,
    ConfigError,
    NoCandidateError,
    PluginError,
    UnknownNameError,
    UnsupportedModelError,
)
from interposer.records import ModelEntry, load_target
from interposer_engine import load, plan
from interposer_engine.parts import decoder_of
from interposer_models.families import GptOss, Llama, Mixtral, Phi3, Qwen3, SmolLM3
from interposer_testing import TrialGroup, verify


@pytest.mark.conformance("interposer-models")
def test_conformance(trial: TrialGroup) -> None:
    trial.verify()


def own_entries() -> list[ModelEntry]:
    entries = current_registry().records(ModelEntry)
    return [entry for plugin, entry in entries if plugin.distribution == "interposer-models"]


@pytest.mark.parametrize("entry", own_entries(), ids=lambda entry: entry.name)
def test_records_list_the_config_fields_that_families_read(entry: ModelEntry) -> None:
    """Every name that a config may use for a field counts."""
    family: Any = load_target(entry.target)
    assert issubclass(family, ModelFamily)
    names = set[str]()
    # Llava's family hands config.json on to the family of its decoder.
    families = getattr(family, "decoders", {"": family}).values()
    for name, field in (item for read in families for item in read.model_fields.items()):
        alias = field.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [name]
        names |= {str(choice) for choice in choices}
    assert {*entry.reads} == names
    assert len(entry.reads) == len(names)


def test_the_page_of_models_lists_every_architecture() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.split("\n## Families\n")[1].split("\n###")[0]
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|([^|]+)\|", table, re.M)))
    architectures = [name for entry in own_entries() for name in entry.architectures]
    assert sorted(listed) == sorted(architectures)


def test_the_readme_states_the_number_of_families() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"[{len(own_entries())} families](docs/models.md)" in readme


class Wrong(Llama):
    """Sees less than Llama does."""

    def attention_spec(self, site: Site, index: int, page_size: int) -> AttentionSpec:
        return replace(super().attention_spec(site, index, page_size), window_tokens=3)


class Twice(Llama):
    """Computes the same, in a frame of its own."""

    def build(self, site: Site, page_size: int) -> Any:
        return Doubled(super().build(site, page_size))


class Doubled(CausalModel):
    def __init__(self, inner: CausalModel) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    @property
    def attention_layers(self) -> Any:
        return self.inner.attention_layers

    def reserve_positions(self, count: int, device: str) -> None:
        self.inner.reserve_positions(count, device)

    def forward(self, *args: Any) -> torch.Tensor:
        logits: torch.Tensor = self.inner(*args)
        return 2 * logits


class Raising(Llama):
    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Any:
        raise KeyError("secret_size")


class Picky(Llama):
    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Any:
        raise UnsupportedModelError(source, "secret_size is not computed")


class Number(Llama):
    @classmethod
    def parse(cls, config: Mapping[str, Any], source: object) -> Any:
        return 7


class Unbuilt(Llama):
    def build(self, site: Site, page_size: int) -> Any:
        raise ZeroDivisionError("no blocks")


class Stranger(Llama):
    def build(self, site: Site, page_size: int) -> Any:
        return torch.nn.Linear(2, 2)


def providing(family: type[ModelFamily], **fields: Any) -> Any:
    """Return the registration of a plugin with a family, above that of the SDK."""
    fields = {"architectures": ("LlamaForCausalLM",), "score": 50.0, **fields}
    target = f"{__name__}:{family.__name__}"
    record = ModelEntry(name=family.__name__.lower(), target=target, **fields)
    return register(SimpleNamespace(interposer_records=hookimpl(lambda: [record])), "acme")


def family_row(path: Path, config: Config | None = None) -> tuple[str, str]:
    """Return the whole row of the family, and what was chosen."""
    rows = explain(path, config=config).why("LlamaForCausalLM")
    (row,) = rows.rows
    return str(rows), row.choice.chosen.name


def test_rules_choose_between_families(llama: Path) -> None:
    with providing(Twice):
        assert family_row(llama)[1] == "twice"
        for rule in ("llama", Rule(forbid=["acme/*"]), Rule(prefer=["interposer-models/*"])):
            text, name = family_row(llama, Config(models={"LlamaForCausalLM": rule}))
            assert name == "llama"
            assert "not twice (acme in code)" in text
        with pytest.raises(UnknownNameError, match="Unknown architecture 'Llama'"):
            plan(llama, config=Config(models={"Llama": "llama"}))
        with pytest.raises(ConfigError, match="promise properties"):
            Config(models={"*": {"require": ["deterministic"]}})


def test_a_family_with_its_own_model_class_runs(llama: Path) -> None:
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    plain = load(llama, dtype="float32", cache_tokens=512)
    with providing(Twice):
        doubled = load(llama, dtype="float32", max_sequences=4)
        assert torch.equal(doubled.logits(prompts[0]), 2 * plain.logits(prompts[0]))
        tokens, expected = (
            [c.token_ids for c in lm.generate(prompts, max_new_tokens=9, ignore_eos=True)]
            for lm in (doubled, plain)
        )
        assert tokens == expected
        with pytest.raises(ConfigError, match=r"builds a Doubled\. Try: quantize"):
            decoder_of(plan(llama))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        (Raising, "raised KeyError('secret_size')"),
        (Picky, "secret_size is not computed"),
        (Number, "its parse returned 7, not a ModelFamily"),
    ],
)
def test_a_failing_family_is_skipped_for_the_next_one(
    llama: Path, family: type[ModelFamily], reason: str
) -> None:
    with providing(family):
        text, name = family_row(llama)
        assert name == "llama"
        assert f"not {family.__name__.lower()} (acme in code): " in text
        assert reason in text


def test_an_error_names_the_only_family_if_it_fails(llama: Path) -> None:
    with providing(Raising):
        pinned = Config(models={"LlamaForCausalLM": "raising"})
        with pytest.raises(NoCandidateError, match=r"raising \(acme in code\): raised KeyError"):
            plan(llama, config=pinned)
    with providing(Picky):
        pinned = Config(models={"LlamaForCausalLM": "picky"})
        with pytest.raises(UnsupportedModelError, match=r"config\.json: secret_size is not"):
            plan(llama, config=pinned)


@pytest.mark.parametrize(
    ("family", "reason"),
    [(Unbuilt, "ZeroDivisionError('no blocks')"), (Stranger, "is not a CausalModel")],
)
def test_an_error_while_building_names_the_plugin(
    llama: Path, family: type[ModelFamily], reason: str
) -> None:
    with providing(family), pytest.raises(PluginError) as caught:
        plan(llama)
    assert "of acme in code: its model family failed in build: " in str(caught.value)
    assert reason in str(caught.value)
    assert "Try: correct it, or use another: Config(models=" in str(caught.value)


def test_a_note_lists_fields_that_only_other_families_read(llama: Path, tmp_path: Path) -> None:
    assert "which other families read" not in family_row(llama)[0]
    config = json.loads((llama / "config.json").read_text())
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = {"moe_intermediate_size": 64, "norm_topk_prob": False, "unheard_of": 3}
    (tmp_path / "config.json").write_text(json.dumps({**config, **fields}))
    text, _ = family_row(tmp_path)
    assert "note: config.json states moe_intermediate_size, which other families read and" in text
    assert "reads attention_bias, dtype, head_dim, hidden_act, hidden_size" in text


def test_the_conformance_suite_detects_a_wrong_family() -> None:
    with providing(Wrong, examples="interposer_models._families.examples:llama"):
        (candidate,) = (c for c in verify("acme").candidates if c.kind == "model")
    assert candidate.state == "wrong"
    findings = [finding for tally in candidate.tallies for finding in tally.findings]
    assert {finding.case for finding in findings} == {"grouped", "long"}
    assert {finding.where for finding in findings} == {"logits of 5 tokens"}
    assert findings[0].reason.startswith("the error is ")


def test_a_null_field_gets_its_default_unless_null_is_valid() -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers"), 8)
    sizes |= {"num_attention_heads": 2, "vocab_size": 9, "max_position_embeddings": 16}
    nothing = dict.fromkeys(("rms_norm_eps", "sliding_window", "rope_scaling", "head_dim"))
    mixtral = Mixtral.parse({**sizes, **nothing}, "config.json")
    assert mixtral.rms_norm_eps == 1e-5
    assert Qwen3.parse(sizes, "config.json").head_size == 128
    assert Qwen3.parse({**sizes, **nothing}, "config.json").head_size == 4
    assert GptOss.parse({**sizes, "head_dim": 4}, "config.json").windows == (128, None) * 4
    assert GptOss.parse({**sizes, **nothing}, "config.json").windows == (None,) * 8


def test_unrotated_layers_are_every_fourth_or_the_listed_ones() -> None:
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers"), 8)
    sizes |= {"num_attention_heads": 4, "vocab_size": 9, "max_position_embeddings": 16}

    def rotating(**fields: Any) -> list[bool]:
        parsed = SmolLM3.parse({**sizes, **fields}, "config.json")
        return [parsed.rotates(index) for index in range(8)]

    assert rotating() == [True, True, True, False] * 2
    assert rotating(no_rope_layer_interval=2) == [True, False] * 4
    assert rotating(no_rope_layers=[0, 1] * 4) == [False, True] * 4


MINI: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 16,
    "pad_token_id": None,
}
ORIGINAL = {"original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.1] * 4, "long_factor": [1.0, 3.0] * 4}


def test_longrope_uses_long_factors_for_all_tokens_of_long_contexts(
    tmp_path: Path,
) -> None:
    """Those of transformers, for which the first tokens are part of a longer sequence."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **FACTORS}
    torch.manual_seed(0)
    peer = Phi3ForCausalLM(Phi3Config(**MINI, rope_parameters={**rope, **ORIGINAL})).eval()
    peer.save_pretrained(tmp_path)
    lm, tokens = load(tmp_path, dtype="float32"), list(range(3, 40))
    with torch.inference_mode():
        expected = peer(torch.tensor([tokens])).logits[0]
        short = peer(torch.tensor([tokens[:9]])).logits[0]
    torch.testing.assert_close(lm.logits(tokens), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lm.logits(tokens[:9]), expected[:9], rtol=0, atol=1e-5)
    assert (lm.logits(tokens[:9]) - short).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["longrope", "su"])
@pytest.mark.parametrize("missing", FACTORS)
def test_both_sets_of_factors_are_checked(name: str, kind: str, missing: str) -> None:
    rope = {name: kind, **FACTORS}
    del rope[missing]
    with pytest.raises(CheckpointError, match=rf"rope_parameters: .*{missing}"):
        Phi3.parse({**MINI, "rope_scaling": rope}, "config.json")
    rope[missing] = [1.0] * 7
    with pytest.raises(CheckpointError, match=rf"{missing}.* must be 8 numbers"):
        Phi3.parse({**MINI, "rope_scaling": rope}, "config.json")
