"""The conformance suite: core-owned checks for whatever a plugin declares.

A plugin author writes no expected values. ``verify`` runs everything that a distribution declares
and reports on it, ``conformance`` yields the trials one by one; the other functions run a single
check on something that is not registered yet.
"""

from __future__ import annotations

from interposer.testing.attention import attention_specs, check_attention
from interposer.testing.conformance import conformance
from interposer.testing.fault import Fault
from interposer.testing.kernel import check_kernel
from interposer.testing.lightness import check_lightness
from interposer.testing.report import Report
from interposer.testing.trial import Aspect, Trial
from interposer.testing.verification import verify

__all__ = [
    "Aspect",
    "Fault",
    "Report",
    "Trial",
    "attention_specs",
    "check_attention",
    "check_kernel",
    "check_lightness",
    "conformance",
    "verify",
]
