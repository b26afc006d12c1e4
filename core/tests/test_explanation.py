"""The explanation shows every choice with every candidate, the same in text and in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from interposer import (
    Capability,
    Config,
    CustomOp,
    Device,
    Kernel,
    OpEntry,
    Registry,
    Requires,
    Resolver,
    Site,
    Tolerance,
    explain,
)


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


@pytest.fixture
def site(registered: Callable[..., Registry]) -> Site:
    device = Device("host", "cpu", "a device", Capability("any"))
    config = Config(kernels={"negate@layers.2": "negate_slow"})
    site = Site(Resolver(registered(*RECORDS), device, config), "layers", torch.float32)
    for name in ("0", "1", "2"):
        site.at(name).bind(NEGATE, size=4)
    return site


def test_the_text_says_what_was_chosen_where_and_why_nothing_else_was(site: Site) -> None:
    assert str(explain(site)) == (
        "device: cpu (a device)\n"
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


def test_the_json_holds_the_same_facts(site: Site) -> None:
    explanation = explain(site)
    facts = json.loads(explanation.to_json())
    assert facts == explanation.to_dict()
    text = str(explanation)
    assert facts["device"] in text
    assert [choice["places"] for choice in facts["choices"]] == [
        ["layers.0", "layers.1"],
        ["layers.2"],
    ]
    for choice in facts["choices"]:
        origin = f"{choice['provider']} {choice['version']}"
        assert f"-> {choice['chosen']} ({origin}): {choice['why']}" in text
        assert (choice["kind"], choice["name"], choice["dtype"]) == ("kernel", "negate", "float32")
        assert choice["dims"] == {"size": 4}
        for refused in choice["refused"]:
            line = f"not {refused['candidate']} ({refused['provider']}): {refused['reason']}"
            assert line in text


def test_every_candidate_appears_in_every_choice(site: Site) -> None:
    candidates = {c.name for c in site.resolver.registry.candidates("kernel", "negate")}
    for choice in explain(site).to_dict()["choices"]:
        refused = [refusal["candidate"] for refusal in choice["refused"]]
        assert sorted([choice["chosen"], *refused]) == sorted(candidates)


def test_nothing_chosen_is_an_empty_list(registered: Callable[..., Registry]) -> None:
    device = Device("host", "cpu", "a device", Capability("any"))
    empty = explain(Site(Resolver(registered(), device, Config()), "", torch.float32))
    assert empty.to_dict() == {"device": "cpu (a device)", "choices": []}
    assert str(empty) == "device: cpu (a device)"
