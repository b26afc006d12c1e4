"""Capturing steps into graphs, for platforms whose part of torch has streams and graphs.

The parts of torch for several vendors have the same names for it: streams, ``graph``, which
captures what is queued on one, and a handle of a pool of memory. What is particular to a platform
is which part and which class of graphs, and what it refuses before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from interposer.errors import ConfigError
from interposer_ops.devices.graphs import judge_compilation

__all__ = ["GraphRecorder", "RecordedStep"]

# Libraries of products, Triton and the allocator set themselves up in the first calls, which a
# capture must not see.
_WARM_UPS = 3


class RecordedStep:
    """A captured step: calling it replays the graph and returns what the step returned.

    The results are the same tensors each time, overwritten by the next replay.
    """

    def __init__(self, graph: Any, results: object) -> None:
        self._graph = graph
        self._results = results

    def __call__(self) -> object:
        """Queue the graph on the current stream."""
        self._graph.replay()
        return self._results


class GraphRecorder:
    """Captures steps of one platform; all of its graphs share a pool of memory.

    Graphs of one pool lend each other memory, so they are replayed one after the other on one
    stream, never at once; what one returned is kept as long as it is captured.

    Args:
        module: the part of torch for the platform's devices, with ``Stream``, ``stream``,
            ``current_stream``, ``current_device``, ``synchronize``, ``graph`` and
            ``graph_pool_handle``.
        graph_type: its class of graphs.
    """

    def __init__(self, module: Any, graph_type: Callable[[], Any]) -> None:
        self._module = module
        self._graph_type = graph_type
        self._streams: dict[int, Any] = {}

    def record(self, step: Callable[[], object]) -> RecordedStep:
        """Return ``step``, captured on the current device after some calls of it.

        Raises: ConfigError: ``step`` is compiled, or captured already.
        """
        verdict = judge_compilation(step)
        if not verdict:
            raise ConfigError(verdict.reason)
        module, stream = self._module, self._stream()
        stream.wait_stream(module.current_stream())
        with module.stream(stream):
            for _ in range(_WARM_UPS):
                step()
        module.current_stream().wait_stream(stream)
        module.synchronize()
        graph = self._graph_type()
        with module.graph(graph, pool=self._pool, stream=stream):
            results = step()
        return RecordedStep(graph, results)

    @cached_property
    def _pool(self) -> Any:
        return self._module.graph_pool_handle()

    def _stream(self) -> Any:
        """Return the stream of the current device on which steps are called and captured.

        The default one cannot be captured. It is the same for both, and for all steps: a library
        that sets itself up once per stream (pytorch/pytorch, pull request 187745) would
        otherwise do so in every capture, where it may not allocate.
        """
        device = self._module.current_device()
        if device not in self._streams:
            self._streams[device] = self._module.Stream()
        return self._streams[device]
