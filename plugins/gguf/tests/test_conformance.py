"""All records of the plugin conform."""

from __future__ import annotations

import pytest

from interposer_testing import TrialGroup


@pytest.mark.conformance("interposer-gguf")
def test_conformance(trial: TrialGroup) -> None:
    trial.verify()
