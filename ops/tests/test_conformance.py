"""Every kernel and attention backend that is installed, through the suite of the core."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from interposer import current_registry, place
from interposer.hookspecs import GROUP
from interposer.testing import Trial, check_lightness, conformance

TRIALS = list(conformance(current_registry(), place().device))
CANDIDATES = sorted({(trial.request.name, trial.candidate.qualified_name) for trial in TRIALS})


@pytest.mark.parametrize("trial", [trial for trial in TRIALS if trial.verdict], ids=str)
def test_what_is_accepted_conforms(trial: Trial) -> None:
    assert trial.run() == []


@pytest.mark.parametrize(("request_name", "candidate"), CANDIDATES)
def test_what_is_refused_is_refused_with_a_reason(request_name: str, candidate: str) -> None:
    """Skip what refuses everything: it was not run here, and its reasons are all there is."""
    own = [
        trial
        for trial in TRIALS
        if (trial.request.name, trial.candidate.qualified_name) == (request_name, candidate)
    ]
    refused = [trial for trial in own if not trial.verdict]
    assert [fault for trial in refused for fault in trial.run()] == []
    if len(refused) == len(own):
        pytest.skip("refuses every case: " + "; ".join(sorted({t.verdict.reason for t in own})))


@pytest.mark.parametrize("module", sorted(point.module for point in entry_points(group=GROUP)))
def test_a_plugin_module_is_light(module: str) -> None:
    assert check_lightness(module) == []
