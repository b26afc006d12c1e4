"""Checks whether the steps of a model can be captured as device graphs.

The obstacles are the same on all platforms; a platform captures every step without a check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from interposer import Candidate, Choice, Placement, Platform, Request, Resolver, Verdict
from interposer.errors import InterposerError
from interposer.records import LayerEntry, PlatformEntry

__all__ = ["judge_choices", "judge_compilation", "judge_graphs"]

_RUNNING_KINDS = ("kernel", "attention", "communicator")
_SAFE = "graph_safe"
_MAX_NAMED = 3
_STANDARD = "standard"


def judge_graphs(
    resolver: Resolver, placement: Placement, outside: frozenset[str] = frozenset()
) -> Verdict | None:
    """Decide if a planned model's steps become device graphs; None if nobody requests graphs.

    By default graphs are requested on every platform with support for graphs. A described device
    answers as its platform would.

    Args:
        outside: prefixes of layers whose kernels run outside of the captured step.
    """
    mode = resolver.config.graphs
    provided = _provided(resolver, placement)
    if mode == "auto" and not provided:
        return None
    if mode == "off":
        return Verdict.refuse("Config(graphs='off') says so") if provided else None
    if not provided:
        return provided  # graphs='on': the refusal of the platform is the answer
    chosen = resolver.choices.values()
    captured = (choice for choice, at in chosen if not (choice.idle or outside.issuperset(at)))
    return judge_choices(captured, resolver.accepted)


def judge_choices(
    choices: Iterable[Choice], accepted: Callable[[Request], Sequence[Candidate]] | None = None
) -> Verdict:
    """Refuse device graphs if any chosen component is not declared safe for graphs.

    Kernels, backends, communicators and layers that replace standard ones must declare
    ``graph_safe``.

    Args:
        accepted: returns the candidates that accept a request; used to report requests without any
            safe candidate.
    """
    # Dicts keep the order of the choices and drop duplicates.
    unsafe: dict[str, str] = {}  # op by component
    replaced: dict[str, str] = {}  # layer by replacement
    stuck: dict[str, None] = {}  # ops without any safe candidate
    waiting: dict[str, None] = {}  # ops between whose calls the host reads results
    for choice in choices:
        chosen, request = choice.chosen, choice.request
        if choice.waits:
            waiting[repr(request.name)] = None
        component = f"{chosen.name} of {chosen.provider}"
        if _SAFE in chosen.properties:
            continue
        if request.kind in _RUNNING_KINDS:
            unsafe[component] = request.name
            if accepted and not any(_SAFE in c.properties for c in accepted(request)):
                stuck[repr(request.name)] = None
        # Standard layers run only kernels and backends, which are checked themselves.
        elif isinstance(chosen.record, LayerEntry) and chosen.record.name != _STANDARD:
            replaced[component] = request.name
    parts, settings = [], []
    if unsafe:
        verb = "does" if len(unsafe) == 1 else "do"
        parts.append(f"{_listed(unsafe)} {verb} not promise to be graph_safe")
        settings.append(f"require={{{_SAFE!r}}}")
    if replaced:
        rules = ", ".join(f"{name!r}: 'standard'" for name in dict.fromkeys(replaced.values()))
        objection = "has code of its own, which does not promise to be graph_safe"
        parts.append(f"the layer {_listed(replaced)} {objection}")
        settings.append(f"layers={{{rules}}}")
    if waiting:
        parts.append(f"layers that call {', '.join(waiting)} read numbers on the host in between")
    if not parts:
        return Verdict.accept()
    remedy = f"Config({', '.join(settings)})"
    if stuck:
        remedy = f"a plugin with a {_SAFE} candidate for {', '.join(stuck)}: there is none here"
    if waiting:
        remedy = "a format of weights that one op computes, or Config(graphs='off')"
    return Verdict.refuse(f"cannot be captured: {', and '.join(parts)}. Try: {remedy}")


def judge_compilation(step: Callable[..., Any]) -> Verdict:
    """Refuse to capture a step that torch.compile compiled: compiled code may use graphs itself.

    Args:
        step: a function, or a module, whose submodules are checked, too.
    """
    parts: list[Any] = [*step.modules()] if isinstance(step, nn.Module) else [step]
    compiled = next((part for part in parts if _is_compiled(part)), None)
    if compiled is None:
        return Verdict.accept()
    subject = "the step" if compiled is step else f"{type(compiled).__name__}, a part of the step,"
    return Verdict.refuse(
        f"{subject} is compiled by torch.compile, which may capture graphs of its own. Try: "
        "capture the plain step, or call the compiled one without capturing it"
    )


def _is_compiled(part: Any) -> bool:
    # Importing the compiler takes a second; if it was never imported, nothing is compiled.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    function = getattr(part, "forward", None) if isinstance(part, nn.Module) else part
    return (
        isinstance(part, frames.OptimizedModule)
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(function, "_torchdynamo_orig_callable")
    )


def _provided(resolver: Resolver, placement: Placement) -> Verdict:
    platform: type[Platform] = type(placement.platform)
    if placement.described:
        chosen = placement.choice.chosen
        assert isinstance(chosen.record, PlatformEntry)
        try:
            platform = resolver.registry.load(chosen, chosen.record.target)
        except InterposerError as error:
            return Verdict.refuse(f"platform {chosen.name!r} does not answer: {error}")
    return platform.provides("capture_graph")


def _listed(names_by_candidate: dict[str, str]) -> str:
    entries = [f"{candidate} for {name!r}" for candidate, name in names_by_candidate.items()]
    more = f" and {len(entries) - _MAX_NAMED} more" if len(entries) > _MAX_NAMED else ""
    return ", ".join(entries[:_MAX_NAMED]) + more
