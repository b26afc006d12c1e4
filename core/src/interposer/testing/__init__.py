"""The conformance suite: core-owned checks for whatever a plugin declares.

A plugin author writes no expected values. ``conformance`` yields one trial per case of everything
that is registered, so that one parametrized test covers all of it; the other functions run a
single check on something that is not registered yet.
"""

from __future__ import annotations

from interposer.testing.attention import attention_specs, check_attention
from interposer.testing.conformance import Trial, conformance
from interposer.testing.fault import Fault
from interposer.testing.kernel import check_kernel
from interposer.testing.lightness import check_lightness

__all__ = [
    "Fault",
    "Trial",
    "attention_specs",
    "check_attention",
    "check_kernel",
    "check_lightness",
    "conformance",
]
