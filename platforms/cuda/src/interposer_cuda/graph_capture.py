"""Capturing a step into a CUDA graph, and when that is refused.

Not run: no GPU was at hand when this was written. What is decided without one, whether a step may
be captured at all, is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from interposer import Verdict
from interposer.choice import Choice

__all__ = ["Captured", "capture", "judge_choices", "judge_step"]

# cuBLAS, Triton and the allocator set themselves up in the first calls, which a capture must not
# see.
_WARM_UPS = 3
_RUNNING = ("kernel", "attention")
_MOST_NAMED = 3


class Captured:
    """A captured step: calling it replays the graph and returns what the step returned.

    The results are the same tensors each time, overwritten by the next replay.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, results: object) -> None:
        self._graph = graph
        self._results = results

    def __call__(self) -> object:
        """Queue the graph on the current stream."""
        self._graph.replay()
        return self._results


def capture(step: Callable[[], object], pool: Any) -> Captured:
    """Return ``step`` as a graph, whose memory is of ``pool``, a handle of torch's.

    Graphs of one pool lend each other memory, so they are replayed one after the other on one
    stream, never at once; what one returned is kept as long as it is captured.
    """
    # A stream of its own: the default one cannot be captured.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        results = step()
    return Captured(graph, results)


def judge_choices(choices: Iterable[Choice]) -> Verdict:
    """Refuse if a kernel or backend among ``choices`` does not promise to be ``graph_safe``."""
    unsafe: dict[str, str] = {}
    for choice in choices:
        chosen = choice.chosen
        if choice.request.kind in _RUNNING and "graph_safe" not in chosen.properties:
            unsafe[f"{chosen.name} of {chosen.provider}"] = choice.request.name
    if not unsafe:
        return Verdict.accept()
    named = [f"{candidate} for {name!r}" for candidate, name in unsafe.items()]
    more = f" and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    verb = "does" if len(named) == 1 else "do"
    return Verdict.refuse(
        f"cannot be captured: {', '.join(named[:_MOST_NAMED])}{more} {verb} not promise to be "
        "graph_safe. Try: Config(require={'graph_safe'})"
    )


def judge_step(step: Callable[[], object]) -> Verdict:
    """Refuse a step that torch.compile made, which captures graphs itself in some of its modes."""
    compiled = hasattr(step, "_torchdynamo_orig_callable") or isinstance(
        step, torch._dynamo.OptimizedModule
    )
    if compiled:
        return Verdict.refuse(
            "the step is compiled by torch.compile, which may capture graphs of its own. Try: "
            "capture the plain step, or call the compiled one without capturing it"
        )
    return Verdict.accept()
