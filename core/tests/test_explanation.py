"""The explanation shows every choice with every candidate, the same in text and in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from interposer import (
    AttentionEntry,
    Capability,
    Config,
    CustomOp,
    Device,
    DeviceEntry,
    Dim,
    Explanation,
    Kernel,
    LayerEntry,
    OpEntry,
    PlatformEntry,
    Registry,
    Requires,
    Resolver,
    Site,
    Tolerance,
    explain,
    register,
    use,
)
from interposer._contract.verdict import Refusal
from interposer._explanation.explanation import settings
from interposer._explanation.inventory import Row, inventory
from interposer.errors import ConfigError, UnknownNameError


def negate(x: torch.Tensor) -> torch.Tensor:
    return -x


NEGATE = CustomOp(negate, "negate", (), (), lambda dtype, seed: iter(()), Tolerance())
RECORDS = (
    OpEntry("negate", f"{__name__}:NEGATE"),
    Kernel("negate", "negate_fast", f"{__name__}:negate", score=20.0),
    Kernel("negate", "negate_slow", f"{__name__}:negate", score=5.0),
    Kernel(
        "negate",
        "negate_wide",
        f"{__name__}:negate",
        requires=Requires(features=frozenset({"avx512"})),
    ),
)
UNASKED = (
    OpEntry("halve", f"{__name__}:NEGATE"),
    Kernel(
        "halve",
        "halve_shift",
        f"{__name__}:negate",
        "abacus",
        Requires(
            frozenset({"slide"}),
            frozenset({"beads"}),
            ("float32", "int8"),
            {"size": Dim(at_least=2, at_most=64, multiple_of=2), "mode": Dim(one_of=("up",))},
        ),
        predicate=f"{__name__}:negate",
        properties=frozenset({"traceable", "deterministic"}),
    ),
    LayerEntry("negation", "standard", f"{__name__}:negate", score=0.0),
    AttentionEntry("beads", f"{__name__}:negate", "abacus"),
)
HOST = Device("host", "cpu", "a device", Capability("any"))


@pytest.fixture
def site(registered: Callable[..., Registry]) -> Site:
    config = Config(kernels={"negate@layers.2": "negate_slow"}, strict=True)
    site = Site(Resolver(registered(*RECORDS, *UNASKED), HOST, config), "layers", torch.float32)
    for name in ("0", "1", "2"):
        site.at(name).bind(NEGATE, size=4)
    return site


def test_the_text_has_one_line_per_choice(site: Site) -> None:
    assert str(explain(site)) == (
        "device: cpu (a device)\n"
        "\n"
        "policy:\n"
        "  kernels.negate@layers.2 = negate_slow (argument)\n"
        "  strict = yes (argument)\n"
        "\n"
        "kernel 'negate' [float32 host size=4]: negate_fast (acme in code), highest score (20); "
        "2 places\n"
        "kernel 'negate' [float32 host size=4]: negate_slow (acme in code), pinned by the "
        "configuration; at layers.2\n"
        "\n"
        "6 other candidates are not shown. Show them with --all, or those of one part with "
        "--why NAME. In Python: explanation.all(), explanation.why(NAME)"
    )


def test_all_adds_the_refusals_and_counts_the_candidates_of_other_platforms(
    registered: Callable[..., Registry],
) -> None:
    elsewhere = [
        Kernel("negate", f"negate_{platform}", f"{__name__}:negate", platform)
        for platform in ("abacus", "loom")
    ]
    registry = registered(*RECORDS, *elsewhere)
    site = Site(Resolver(registry, HOST, Config()), "layers", torch.float32)
    site.bind(NEGATE, size=4)
    explanation = explain(site)
    text = str(explanation.all())
    assert text.endswith(
        "     not negate_wide (acme in code): needs avx512, which the device lacks\n"
        "     not 2 candidates of other platforms: abacus, loom"
    )
    assert explanation.all().to_dict() == explanation.to_dict()
    assert "not negate_loom (acme in code): runs on loom" in str(explanation.why("negate"))


def test_without_a_model_the_text_has_one_line_per_subject(
    registered: Callable[..., Registry],
) -> None:
    registry = registered(*RECORDS, *UNASKED)
    subjects = inventory(registry, HOST)
    explanation = Explanation(HOST, subjects=subjects)
    assert str(explanation) == (
        "device: cpu (a device)\n"
        "\n"
        "kernel 'halve': reference (acme in code), score 0; 1 of 2 candidates fit the device\n"
        "kernel 'negate': negate_fast (acme in code), score 20; 3 of 4 candidates fit the device\n"
        "attention backends: no candidate fits the device, of 1\n"
        "layer 'negation': standard (acme in code), score 0\n"
        "\n"
        "4 other candidates are not shown. Show them with --all, or those of one part with "
        "--why NAME. In Python: explanation.all(), explanation.why(NAME)"
    )
    text = str(explanation.all())
    assert "kernel 'halve'\n  reference (acme in code): score 0, fits the device\n" in text
    assert "\n  1 candidate of another platform: abacus\n" in text


def test_the_complete_text_has_places_reasons_and_refusals(site: Site) -> None:
    assert str(explain(site).all()) == (
        "device: cpu (a device)\n"
        "\n"
        "policy:\n"
        "  kernels.negate@layers.2 = negate_slow (argument)\n"
        "  strict = yes (argument)\n"
        "\n"
        "kernel 'negate' [float32 host size=4], at layers.0 and 1 more\n"
        "  -> negate_fast (acme in code): highest score (20)\n"
        "     not negate_slow (acme in code): accepted, but outranked (score 5 < 20)\n"
        "     not reference (acme in code): accepted, but outranked (score 0 < 20)\n"
        "     not negate_wide (acme in code): needs avx512, which the device lacks\n"
        "\n"
        "kernel 'negate' [float32 host size=4], at layers.2\n"
        "  -> negate_slow (acme in code): pinned by the configuration\n"
        "     not negate_fast (acme in code): accepted, but negate_slow is pinned\n"
        "     not reference (acme in code): accepted, but negate_slow is pinned\n"
        "     not negate_wide (acme in code): needs avx512, which the device lacks"
    )


def test_the_json_has_the_facts_of_the_text(site: Site) -> None:
    explanation = explain(site)
    facts = json.loads(explanation.to_json())
    assert facts == explanation.to_dict()
    assert facts["version"] == 1
    assert facts["device"] == {"platform": "host", "torch_device": "cpu", "name": "a device"}
    assert facts["policy"] == [
        {"setting": "kernels.negate@layers.2", "value": "negate_slow", "source": "argument"},
        {"setting": "strict", "value": "yes", "source": "argument"},
    ]
    text = str(explanation.all())
    assert [choice["places"] for choice in facts["choices"]] == [
        ["layers.0", "layers.1"],
        ["layers.2"],
    ]
    for choice in facts["choices"]:
        origin = f"{choice['provider']} {choice['version']}"
        assert f"-> {choice['chosen']} ({origin}): {choice['why']}" in text
        assert (choice["kind"], choice["name"], choice["dtype"]) == ("kernel", "negate", "float32")
        assert choice["dims"] == {"size": 4}
        assert (choice["seconds"], choice["notes"]) == ({}, [])
        for refused in choice["refused"]:
            line = f"not {refused['candidate']} ({refused['provider']}): {refused['reason']}"
            assert line in text


def test_every_candidate_appears_in_every_choice(site: Site) -> None:
    candidates = {c.name for c in site.resolver.registry.candidates("kernel", "negate")}
    for choice in explain(site).to_dict()["choices"]:
        refused = [refusal["candidate"] for refusal in choice["refused"]]
        assert sorted([choice["chosen"], *refused]) == sorted(candidates)


def test_a_model_without_choices_has_an_empty_list(registered: Callable[..., Registry]) -> None:
    empty = explain(Site(Resolver(registered(), HOST, Config()), "", torch.float32))
    assert empty.to_dict()["choices"] == []
    assert str(empty) == "device: cpu (a device)"


def test_run_times_notes_and_failures_are_shown(site: Site) -> None:
    explanation = explain(site)
    seconds = {"acme/reference": 2.5e-3, "acme/negate_fast": 12.34e-6, "acme/negate_slow": 1.5}
    choice = replace(
        explanation.rows[0].choice, seconds=seconds, notes=("'acme/x*' is preferred: not there",)
    )
    failure = Refusal("negate_wide", "acme 1", "raised OSError()", "Traceback\n  OSError")
    explained = replace(explanation, rows=(Row(choice, ("a",)),), failures=(failure,))
    text = str(explained.all())
    figures = "acme/negate_fast 12.3 us, acme/reference 2.5 ms, acme/negate_slow 1.5 s"
    assert f"\n     measured: {figures}\n     note: 'acme/x*' is preferred: not there\n" in text
    assert text.endswith("failed while running:\n  negate_wide (acme 1): raised OSError()")
    assert "; at a\n  note: 'acme/x*' is preferred: not there\n" in str(explained)
    assert "raised OSError()" in str(explained)
    facts = explained.to_dict()
    assert facts["choices"][0]["seconds"] == seconds
    assert facts["choices"][0]["notes"] == ["'acme/x*' is preferred: not there"]
    assert facts["failures"][0]["traceback"] == "Traceback\n  OSError"
    in_full = str(explained.why("negate"))
    assert "raised OSError()\n         Traceback\n           OSError" in in_full


def test_why_shows_one_op_with_every_place(site: Site) -> None:
    explained = explain(site).why("negate")
    text = str(explained)
    assert "kernel 'negate' [float32 host size=4], at\n  layers.0\n  layers.1\n  ->" in text
    assert "layers.0\nlayers.1" not in str(explain(site))
    assert [row.choice for row in explained.rows] == [row.choice for row in explain(site).rows]


def test_why_shows_unrequested_subjects_with_requirements(site: Site) -> None:
    explained = explain(site).why("halve")
    assert [setting.field for setting in explained.policy] == ["strict"]
    assert str(explained) == (
        "device: cpu (a device)\n"
        "note: the model does not request 'halve'\n"
        "\n"
        "policy:\n"
        "  strict = yes (argument)\n"
        "\n"
        "kernel 'halve'\n"
        "  halve_shift (acme in code): score 10 on abacus, "
        "refused: runs on abacus, the request is for host\n"
        f"      target: {__name__}:negate\n"
        "      needs platform abacus\n"
        "      needs architecture beads\n"
        "      needs features slide\n"
        "      needs dtype float32 or int8\n"
        "      needs size at least 2 and at most 64 and a multiple of 2\n"
        "      needs mode one of ['up']\n"
        f"      needs acceptance by {__name__}:negate\n"
        "      promises deterministic, traceable\n"
        "  reference (acme in code): score 0, fits the device\n"
        f"      target: {__name__}:NEGATE"
    )


def test_why_takes_layers_and_attention_types(site: Site) -> None:
    for name, kind in (("negation", "layer"), ("decoder", "attention"), ("attention", "attention")):
        (subject,) = explain(site).why(name).subjects
        assert subject.kind == kind


def test_why_of_an_unknown_name_lists_the_known_ones(site: Site) -> None:
    with pytest.raises(UnknownNameError, match="'nagate'") as caught:
        explain(site).why("nagate")
    assert caught.value.known[0] == "negate"
    assert {"halve", "negation", "attention"} < set(caught.value.known)
    assert "" not in caught.value.known


def test_the_inventory_judges_only_the_device(
    registered: Callable[..., Registry],
) -> None:
    registry = registered(*RECORDS, *UNASKED)
    abacus = Device("abacus", "cpu", "", Capability("beads", frozenset({"slide"})))
    for device, fits in ((abacus, True), (HOST, False)):
        options_by_subject = {(s.kind, s.name): s.options for s in inventory(registry, device)}
        assert list(options_by_subject) == [
            ("kernel", "halve"),
            ("kernel", "negate"),
            ("attention", ""),
            ("layer", "negation"),
        ]
        halve = {
            option.candidate.name: option.verdict
            for option in options_by_subject["kernel", "halve"]
        }
        assert bool(halve["halve_shift"]) == fits
        assert halve["reference"]
        names = [option.candidate.name for option in options_by_subject["kernel", "negate"]]
        assert names == ["negate_fast", "negate_wide", "negate_slow", "reference"]


def test_a_config_for_a_built_model_is_refused(site: Site) -> None:
    with pytest.raises(ConfigError, match="which has one already"):
        explain(site, config=Config())


def test_each_setting_names_the_source_that_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "interposer.toml").write_text(
        'strict = true\n[kernels]\nnegate = "negate_fast"\nhalve = "reference"\n'
        'threes = { prefer = ["a", "b*"], forbid = ["c"] }\n'
    )
    monkeypatch.setenv("INTERPOSER_KERNELS", "negate=reference,doubles=reference")
    monkeypatch.setenv("INTERPOSER_DISABLE", "zeta,acme")
    monkeypatch.delenv("INTERPOSER_CACHE_DIR", raising=False)
    Config.refresh()
    with use(layers={"negation": "standard"}) as config:
        config = config.model_copy(update={"locked": True, "plugins": frozenset()})
        options_by_subject = {str(s): (s.value, s.source) for s in settings(config)}
    assert options_by_subject == {
        "kernels.doubles": ("reference", "environment"),
        "kernels.negate": ("negate_fast", "project file"),
        "kernels.halve": ("reference", "project file"),
        "kernels.threes": ("+a, +b*, -c", "project file"),
        "layers.negation": ("standard", "use()"),
        "disable": ("acme, zeta", "environment"),
        "plugins": ("none", "argument"),
        "strict": ("yes", "project file"),
        "locked": ("yes", "argument"),
    }


ABACUS = """
from interposer import Platform

class Abacus(Platform):
    name = "abacus"
    device_type = "cpu"

    @classmethod
    def probe(cls):
        raise AssertionError("probed")

    def __init__(self):
        raise AssertionError("built")

    def devices(self): ...
    def capability(self, device): ...
    def dtypes(self, device): ...
"""
NINE = {
    "version": 1,
    "name": "Abacus 9",
    "platform": "abacus",
    "torch_device": "cpu",
    "architecture": "beads",
    "features": ["slide"],
    "formats": [],
    "units": 1,
    "memory_bytes": 1,
    "caches_bytes": {},
    "dtypes": ["float32"],
}


def test_a_described_device_is_explained_without_its_platform(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_plugin: Callable[..., ModuleType]
) -> None:
    (tmp_path / "explained").mkdir()
    (tmp_path / "explained" / "nine.json").write_text(json.dumps(NINE))
    (tmp_path / "explained" / "abacus.py").write_text(ABACUS)
    monkeypatch.syspath_prepend(tmp_path)
    abacus = PlatformEntry("abacus", "explained.abacus:Abacus")
    nine = DeviceEntry("nine", "abacus", "explained:nine.json")
    with register(make_plugin("explained_abacus", abacus, nine, *RECORDS)), use(plugins="none"):
        for device in ("nine", tmp_path / "explained" / "nine.json"):
            explanation = explain(device=device)
            assert explanation.device.name == "Abacus 9"
            assert explanation.notes == (explanation.rows[0].choice.why,)
            assert "note: 'Abacus 9' is described" in str(explanation)
            options = {
                option.candidate.name: option.verdict
                for subject in explanation.subjects
                for option in subject.options
                if subject.name == "negate"
            }
            assert options["negate_fast"]
            assert options["negate_wide"].reason == "needs avx512, which the device lacks"


def test_why_of_a_candidate_names_its_subject(site: Site) -> None:
    for name, op in (("negate_wide", "negate"), ("acme/halve_shift", "halve")):
        with pytest.raises(ConfigError) as caught:
            explain(site).why(name)
        assert str(caught.value) == f"{name!r} is a candidate for {op!r}. Try: --why {op}"
    with pytest.raises(ConfigError, match="'reference' is a candidate for 'halve' and 1 more"):
        explain(site).why("reference")
    with pytest.raises(ConfigError, match="Try: --why attention"):
        explain(site).why("beads")


def test_an_unknown_name_names_the_command_that_lists_all(
    registered: Callable[..., Registry],
) -> None:
    ops = [OpEntry(f"negate_{number}", f"{__name__}:NEGATE") for number in range(12)]
    explanation = explain(Site(Resolver(registered(*ops), HOST, Config()), "", torch.float32))
    with pytest.raises(UnknownNameError) as caught:
        explanation.why("negate_x")
    assert len(caught.value.known) == 12
    assert str(caught.value).endswith(", and 9 more.\n`interposer explain` lists all.")


def test_a_kernel_for_an_undefined_op_is_explained(
    registered: Callable[..., Registry],
) -> None:
    registry = registered(*RECORDS, Kernel("nagate", "negate_lost", f"{__name__}:negate"))
    site = Site(Resolver(registry, HOST, Config()), "", torch.float32)
    text = str(explain(site).why("nagate"))
    assert (
        "  negate_lost (acme in code): score 10, "
        "refused: it is for the op 'nagate', which no installed plugin defines; nearest: 'negate'\n"
    ) in text


def test_an_unexplainable_object_is_named_by_its_type() -> None:
    with pytest.raises(ConfigError, match="model is of the type int, must be a model directory"):
        explain(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="device is of the type int, must be the name"):
        explain(None, device=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model is of the type list"):
        explain([], device="none.json")  # type: ignore[arg-type]


def test_all_attention_types_share_one_heading(site: Site) -> None:
    assert "attention backends" in str(explain(site).why("decoder")).splitlines()
