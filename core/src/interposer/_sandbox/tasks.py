"""The tasks of the sandbox by name; the same in the examining process and in this one."""

from __future__ import annotations

from interposer._contract.errors import FOREIGN_ERRORS
from interposer._sandbox.inspection import (
    examine_platform,
    examine_plugin,
    examine_predicate,
    examine_targets,
)
from interposer._sandbox.task import Finding, Reporter, Task


def perform(task: Task, reporter: Reporter | None = None) -> Finding:
    """Do a task in this process and return what was found.

    What the code under examination raises becomes a refusal; a crash or a hang does not.
    """
    reporter = reporter or Reporter()
    try:
        match task.name:
            case "plugin":
                return examine_plugin(task, reporter)
            case "target":
                return examine_targets(task, reporter)
            case "platform":
                return examine_platform(task, reporter)
            case "predicate":
                return examine_predicate(task, reporter)
            case "kernel":
                # It needs torch, which the other tasks may do without.
                from interposer._sandbox.kernel_comparison import examine_kernel

                return examine_kernel(task, reporter)
    except FOREIGN_ERRORS as error:
        return Finding.raised(reporter.stage, error)
