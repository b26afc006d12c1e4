"""The hooks that a plugin may implement, in pluggy's terms.

A plugin is a module or object named by an entry point in the group ``interposer.plugins``. That
module must import only interposer and the standard library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pluggy

from interposer._contract.choice import Choice
from interposer._contract.errors import NoCandidateError
from interposer._contract.records import Record

if TYPE_CHECKING:
    from interposer._contract.platform import Placement

# fmt: off
__all__ = [
    "GROUP", "Activity", "hookimpl", "interposer_failed", "interposer_finished",
    "interposer_plan", "interposer_records", "interposer_refused", "interposer_selected",
]
# fmt: on

Activity = Literal["discovery", "probe", "selection", "load", "tune"]

GROUP = "interposer.plugins"

hookspec = pluggy.HookspecMarker("interposer")
hookimpl = pluggy.HookimplMarker("interposer")


@hookspec
def interposer_records() -> Iterable[Record]:  # type: ignore[empty-body]
    """Return everything that the plugin provides, as declarative records."""


@hookspec(firstresult=True)
def interposer_plan(
    path: Path,
    config: Any,
    dtype: str,
    placement: Placement | None,
    quantization: str | Mapping[str, Any] | None,
    tensor_parallel: int | None,
    expert_parallel: Any,
) -> Any:
    """Return a ``Planned`` with every choice for the model in ``path``; read no weights.

    Return None to leave the directory to the next plugin. A hook without a parameter for an
    argument that the caller set is skipped.

    Args:
        config: the effective ``Config``.
        placement: the target of the plan; None leaves the target to the selection.
        quantization: the method for quantizing unquantized weights at load time, or the settings of
            a method.
        tensor_parallel: the number of processes that compute the model together.
        expert_parallel: the expert parallelism across these processes.
    """


@hookspec
def interposer_selected(choice: Choice) -> None:
    """Observe a choice, once per distinct request of a resolver."""


@hookspec
def interposer_refused(error: NoCandidateError) -> None:
    """Observe a request for which every candidate was refused."""


@hookspec
def interposer_failed(plugin: str, distribution: str, reason: str) -> None:
    """Observe the quarantine of a plugin."""


@hookspec
def interposer_finished(
    activity: Activity,
    subject: str,
    start_ns: int,
    end_ns: int,
    facts: Mapping[str, str | int | float | bool],
) -> None:
    """Observe the end of an activity; times are nanoseconds since the epoch."""
