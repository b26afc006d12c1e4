"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A deadline per example fails on a busy machine, and says nothing about the code.
settings.register_profile("unhurried", settings.get_profile("default"), deadline=None)
if settings.get_current_profile_name() == "default":  # in CI, its own profile has none either
    settings.load_profile("unhurried")
