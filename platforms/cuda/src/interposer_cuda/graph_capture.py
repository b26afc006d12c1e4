"""Capturing a step into a CUDA graph.

Not run: no GPU was at hand when this was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Captured", "capture"]

# cuBLAS, Triton and the allocator set themselves up in the first calls, which a capture must not
# see.
_WARM_UPS = 3


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
