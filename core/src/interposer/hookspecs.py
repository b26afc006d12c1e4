"""The hooks that a plugin may implement, in pluggy's terms.

A plugin is a module or object named by an entry point in the group ``interposer.plugins``. Its
module imports interposer and the standard library only.
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
    """Return the model in the directory ``path`` with every choice made and no weight read.

    It is a ``Planned``; None leaves the directory to the next plugin. ``config`` is the ``Config``
    in force. ``placement`` is where it is planned for; None leaves that to the selection.
    ``quantization`` is the method by which plain weights are to be quantized while they load, or
    its settings. ``tensor_parallel`` is the number of processes that are to compute it together,
    and ``expert_parallel`` how its experts are to be placed on these.
    Where one of them is given, only who takes it is asked.
    """


@hookspec
def interposer_selected(choice: Choice) -> None:
    """Observe a choice, once per distinct request of a resolver."""


@hookspec
def interposer_refused(error: NoCandidateError) -> None:
    """Observe a request for which every candidate was refused."""


@hookspec
def interposer_failed(plugin: str, distribution: str, reason: str) -> None:
    """Observe that a plugin was quarantined."""


@hookspec
def interposer_finished(
    activity: Activity,
    subject: str,
    start_ns: int,
    end_ns: int,
    facts: Mapping[str, str | int | float | bool],
) -> None:
    """Observe that something which takes time has ended, in nanoseconds since the epoch."""
