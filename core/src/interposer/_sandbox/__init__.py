"""The examination of plugin code, in a process of its own, before this process runs it.

It protects against plugins that are broken, careless or built for another machine. It is no
sandbox: code that means harm can do it from the child as well.
"""

from __future__ import annotations

from interposer._sandbox.examiner import ExaminationError, examine, examine_all, forget_verdicts
from interposer._sandbox.inspection import check_plugin
from interposer._sandbox.side_effects import Witness
from interposer._sandbox.task import Finding, Reporter, Task
from interposer._sandbox.tasks import perform

__all__ = [
    "ExaminationError",
    "Finding",
    "Reporter",
    "Task",
    "Witness",
    "check_plugin",
    "examine",
    "examine_all",
    "forget_verdicts",
    "perform",
]
