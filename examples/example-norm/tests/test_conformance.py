"""Check that all records of this plugin conform: the one test file that every plugin needs."""

from __future__ import annotations

import pytest

from interposer_testing import TrialGroup


@pytest.mark.conformance("interposer-example-norm")
def test_conformance(trial: TrialGroup) -> None:
    trial.verify()
