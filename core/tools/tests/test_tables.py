"""A wide terminal gets the facts of an explanation and of a report in tables."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from interposer import (
    Capability,
    Config,
    CustomOp,
    Device,
    Kernel,
    OpEntry,
    Refusal,
    Registry,
    Requires,
    Resolver,
    Site,
    Tolerance,
    explain,
)
from interposer.tooling import Row
from interposer_testing import Examined, Ground, Report, Tally
from interposer_tools._explanation_tables import explanation_tables
from interposer_tools._report_tables import report_tables


def negate(x: torch.Tensor) -> torch.Tensor:
    return -x


NEGATE = CustomOp(negate, "negate", (), (), lambda dtype, seed: iter(()), Tolerance())
HOST = Device("host", "cpu", "a device", Capability("any"))
RECORDS = (
    OpEntry("negate", f"{__name__}:NEGATE"),
    Kernel("negate", "negate_fast", f"{__name__}:negate", score=20.0),
    Kernel(
        "negate",
        "negate_wide",
        f"{__name__}:negate",
        requires=Requires(features=frozenset({"avx512"})),
    ),
)


@pytest.fixture
def site(registered: Callable[..., Registry]) -> Site:
    config = Config(kernels={"negate@layers.2": "negate_fast"})
    site = Site(Resolver(registered(*RECORDS), HOST, config), "layers", torch.float32)
    for name in ("0", "1", "2"):
        site.at(name).bind(NEGATE, size=4)
    return site


def printed(renderables: Iterator[Any]) -> str:
    """Return the text that a wide terminal shows."""
    console = Console(file=io.StringIO(), width=250)
    console.print(*renderables)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_an_explanation_is_shown(site: Site) -> None:
    text = printed(explanation_tables(explain(site)))
    assert "negate_fast" in text
    assert "negate_wide" not in text
    assert "4 other candidates are not shown" in text
    text = printed(explanation_tables(explain(site).all()))
    for words in (
        "device: cpu (a device)",
        "kernels.negate@layers.2",
        "kernel 'negate' [float32 host size=4]",
        "highest score (20)",
        "negate_wide (acme in code): needs avx512, which the device lacks",
    ):
        assert words in text


def test_measurements_and_failures_of_an_explanation_are_shown(site: Site) -> None:
    explanation = explain(site)
    choice = replace(explanation.rows[0].choice, seconds={"acme/negate_fast": 12.34e-6})
    failure = Refusal("negate_wide", "acme 1", "raised OSError()", "Traceback\n  OSError")
    failed = replace(explanation, rows=(Row(choice, ("a",)),), failures=(failure,))
    text = printed(explanation_tables(failed))
    assert "acme/negate_fast 12.3 us" in text
    assert "raised OSError()" in text


def test_candidates_are_shown_without_a_model() -> None:
    text = printed(explanation_tables(explain()))
    assert "kernel 'rms_norm'" in text
    assert "fit the device" in text
    text = printed(explanation_tables(explain().all()))
    assert "rms_norm" in text
    assert "fits the device" in text


def test_a_report_is_shown() -> None:
    ground = Ground("a device", "host", "cpu", "any", "Linux", "3.11", "2.13")
    tallies = (Tally("numerics", failed=9, cases=3), Tally("threads", refused={"needs beads": 2}))
    candidate = Examined("kernel", "negate", "shifted", "acme", "1", "host", tallies=tallies)
    report = Report(
        "acme", "1", ground, "2026-03-01T12:00:00Z", seed=3, quick=False, candidates=(candidate,)
    )
    text = printed(report_tables(report))
    assert "numerics: 0 of 9 passed" in text
    assert "needs beads" in text
    assert "WRONG" in text
    assert report.summary in text
