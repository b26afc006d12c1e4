"""The conformance kit: tests for every record of a plugin.

You write no expected values. ``verify`` tests every record of a distribution and returns a report;
``conformance`` yields the same trials one by one. The other functions run a single check, also on
code that is not registered yet. Every name is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interposer.tooling import lazy_attributes

if TYPE_CHECKING:
    from interposer_testing._checks.attention import check_attention
    from interposer_testing._checks.attention_properties import (
        check_attention_batches,
        check_attention_determinism,
    )
    from interposer_testing._checks.attention_specs import attention_specs
    from interposer_testing._checks.call import Subject, tensors_of
    from interposer_testing._checks.expectation import Expectation, result_faults
    from interposer_testing._checks.fault import Fault
    from interposer_testing._checks.kernel import check_kernel
    from interposer_testing._checks.lightness import check_lightness
    from interposer_testing._checks.scheme import check_scheme
    from interposer_testing._judge.judging import Budget, judge
    from interposer_testing._judge.task import Solution, Task, Workload
    from interposer_testing._judge.verdict import Finding, Timing, Verdict
    from interposer_testing._plan.plan import plan
    from interposer_testing._reports.facts import Examined, Ground, Tally
    from interposer_testing._reports.html import html
    from interposer_testing._reports.junit import junit
    from interposer_testing._reports.markdown import markdown
    from interposer_testing._reports.report import Report
    from interposer_testing._reports.text import reason_lines, wrong_blocks
    from interposer_testing._tasks import read_solution, read_task
    from interposer_testing._trials.conformance import attention_trials, conformance
    from interposer_testing._trials.host import Host
    from interposer_testing._trials.isolation import Isolation, side_by_side
    from interposer_testing._trials.layers_and_schemes import layer_trials, scheme_trials
    from interposer_testing._trials.outcome import Progress
    from interposer_testing._trials.trial import Trial
    from interposer_testing._trials.trial_group import TrialGroup
    from interposer_testing._trials.verification import verify

__all__ = [
    "Budget",
    "Examined",
    "Expectation",
    "Fault",
    "Finding",
    "Ground",
    "Host",
    "Isolation",
    "Progress",
    "Report",
    "Solution",
    "Subject",
    "Tally",
    "Task",
    "Timing",
    "Trial",
    "TrialGroup",
    "Verdict",
    "Workload",
    "attention_specs",
    "attention_trials",
    "check_attention",
    "check_attention_batches",
    "check_attention_determinism",
    "check_kernel",
    "check_lightness",
    "check_scheme",
    "conformance",
    "html",
    "judge",
    "junit",
    "layer_trials",
    "markdown",
    "plan",
    "read_solution",
    "read_task",
    "reason_lines",
    "result_faults",
    "scheme_trials",
    "side_by_side",
    "tensors_of",
    "verify",
    "wrong_blocks",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "interposer_testing._checks.attention": "check_attention",
        "interposer_testing._checks.attention_specs": "attention_specs",
        "interposer_testing._checks.attention_properties": (
            "check_attention_batches check_attention_determinism"
        ),
        "interposer_testing._checks.call": "Subject tensors_of",
        "interposer_testing._checks.expectation": "Expectation result_faults",
        "interposer_testing._checks.fault": "Fault",
        "interposer_testing._checks.kernel": "check_kernel",
        "interposer_testing._checks.lightness": "check_lightness",
        "interposer_testing._checks.scheme": "check_scheme",
        "interposer_testing._judge.judging": "Budget judge",
        "interposer_testing._judge.task": "Solution Task Workload",
        "interposer_testing._judge.verdict": "Finding Timing Verdict",
        "interposer_testing._plan.plan": "plan",
        "interposer_testing._reports.facts": "Examined Ground Tally",
        "interposer_testing._reports.html": "html",
        "interposer_testing._reports.junit": "junit",
        "interposer_testing._reports.markdown": "markdown",
        "interposer_testing._reports.report": "Report",
        "interposer_testing._reports.text": "reason_lines wrong_blocks",
        "interposer_testing._tasks": "read_solution read_task",
        "interposer_testing._trials.conformance": "attention_trials conformance",
        "interposer_testing._trials.host": "Host",
        "interposer_testing._trials.isolation": "Isolation side_by_side",
        "interposer_testing._trials.layers_and_schemes": "layer_trials scheme_trials",
        "interposer_testing._trials.outcome": "Progress",
        "interposer_testing._trials.trial": "Trial",
        "interposer_testing._trials.trial_group": "TrialGroup",
        "interposer_testing._trials.verification": "verify",
    },
)


def __dir__() -> list[str]:
    return __all__
