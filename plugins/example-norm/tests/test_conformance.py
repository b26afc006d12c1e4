"""Everything that the example declares does what it says: the one file that a plugin needs."""

from __future__ import annotations

import pytest

from interposer_testing import TrialGroup


@pytest.mark.conformance("interposer-example-norm")
def test_conformance(trial: TrialGroup) -> None:
    trial.verify()
