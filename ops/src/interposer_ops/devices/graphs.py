"""The verdict on capturing the steps of a model as graphs.

A platform captures whatever it is given; what is in the way of it, is the same on all of them.
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

_RUNNING = ("kernel", "attention", "communicator")
_SAFE = "graph_safe"
_MOST_NAMED = 3
_STANDARD = "standard"


def judge_graphs(
    resolver: Resolver, placement: Placement, outside: frozenset[str] = frozenset()
) -> Verdict | None:
    """Say whether the steps of a planned model become graphs; None where nobody asks for it.

    By default a platform that has graphs asks for them. A described device answers as its
    platform would.

    Args:
        outside: prefixes of places whose kernels run outside of the captured step.
    """
    wanted = resolver.config.graphs
    provided = _provided(resolver, placement)
    if wanted == "auto" and not provided:
        return None
    if wanted == "off":
        return Verdict.refuse("Config(graphs='off') says so") if provided else None
    if not provided:
        return provided
    made = resolver.choices.values()
    captured = (choice for choice, at in made if not (choice.idle or outside.issuperset(at)))
    return judge_choices(captured, resolver.accepted)


def judge_choices(
    choices: Iterable[Choice], accepted: Callable[[Request], Sequence[Candidate]] | None = None
) -> Verdict:
    """Refuse if anything that is chosen does not promise to work in a graph.

    Kernels, backends, communicators and layers that replace standard ones have to promise
    ``graph_safe``.

    Args:
        accepted: returns what accepts a request; with it is said where nothing else is safe.
    """
    unsafe: dict[str, str] = {}
    replaced: dict[str, str] = {}
    stuck: dict[str, None] = {}
    waiting: dict[str, None] = {}
    for choice in choices:
        chosen, request = choice.chosen, choice.request
        if choice.waits:
            waiting[repr(request.name)] = None
        who = f"{chosen.name} of {chosen.provider}"
        if _SAFE in chosen.properties:
            continue
        if request.kind in _RUNNING:
            unsafe[who] = request.name
            if accepted and not any(_SAFE in other.properties for other in accepted(request)):
                stuck[repr(request.name)] = None
        elif isinstance(chosen.record, LayerEntry) and chosen.record.name != _STANDARD:
            replaced[who] = request.name
    parts, settings = [], []
    if unsafe:
        verb = "does" if len(unsafe) == 1 else "do"
        parts.append(f"{_listed(unsafe)} {verb} not promise to be graph_safe")
        settings.append(f"require={{{_SAFE!r}}}")
    if replaced:
        rules = ", ".join(f"{name!r}: 'standard'" for name in dict.fromkeys(replaced.values()))
        own = "has code of its own, which does not promise to be graph_safe"
        parts.append(f"the layer {_listed(replaced)} {own}")
        settings.append(f"layers={{{rules}}}")
    if waiting:
        parts.append(f"layers that call {', '.join(waiting)} read numbers on the host in between")
    if not parts:
        return Verdict.accept()
    mend = f"Config({', '.join(settings)})"
    if stuck:
        mend = f"a plugin with a {_SAFE} candidate for {', '.join(stuck)}: there is none here"
    if waiting:
        mend = "a format of weights that one op computes, or Config(graphs='off')"
    return Verdict.refuse(f"cannot be captured: {', and '.join(parts)}. Try: {mend}")


def judge_compilation(step: Callable[..., Any]) -> Verdict:
    """Refuse what torch.compile made, or has a part in: it may capture graphs itself.

    Args:
        step: a function, or a module, whose parts are looked at as well.
    """
    parts: list[Any] = [*step.modules()] if isinstance(step, nn.Module) else [step]
    compiled = next((part for part in parts if _is_compiled(part)), None)
    if compiled is None:
        return Verdict.accept()
    what = "the step" if compiled is step else f"{type(compiled).__name__}, a part of the step,"
    return Verdict.refuse(
        f"{what} is compiled by torch.compile, which may capture graphs of its own. Try: "
        "capture the plain step, or call the compiled one without capturing it"
    )


def _is_compiled(part: Any) -> bool:
    # The compiler takes a second to import; where nobody did, nothing is compiled.
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        return False
    own = getattr(part, "forward", None) if isinstance(part, nn.Module) else part
    return (
        isinstance(part, frames.OptimizedModule)
        or getattr(part, "_compiled_call_impl", None) is not None
        or hasattr(own, "_torchdynamo_orig_callable")
    )


def _provided(resolver: Resolver, placement: Placement) -> Verdict:
    platform: type[Platform] = type(placement.platform)
    if placement.described:
        chosen = placement.choice.chosen
        assert isinstance(chosen.record, PlatformEntry)
        try:
            platform = resolver.registry.load(chosen, chosen.record.target)
        except InterposerError as error:
            return Verdict.refuse(f"platform {chosen.name!r} cannot be asked: {error}")
    return platform.provides("capture_graph")


def _listed(found: dict[str, str]) -> str:
    named = [f"{candidate} for {name!r}" for candidate, name in found.items()]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return ", ".join(named[:_MOST_NAMED]) + more
