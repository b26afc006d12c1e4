"""All records of the example conform: the one test file that a plugin needs."""

from __future__ import annotations

import pytest

from interposer_testing import TrialGroup


@pytest.mark.conformance("interposer-example-norm")
def test_conformance(trial: TrialGroup) -> None:
    trial.verify()
