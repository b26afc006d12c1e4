"""Tests under a policy that neither the machine nor the checkout touches."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_policy(no_policy: None) -> None:
    pass
