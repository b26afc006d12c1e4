"""Capturing steps into device graphs, for platforms whose torch module has streams and graphs.

torch's modules for several vendors share the same names: streams, ``graph``, which captures the
work queued on a stream, and handles of memory pools. A platform passes its module and graph class,
and refuses unsuitable steps beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from interposer.errors import ConfigError
from interposer_ops.devices.graphs import judge_compilation

__all__ = ["GraphRecorder", "RecordedStep"]

# BLAS libraries, Triton and the allocator initialise in the first calls, which must not happen
# during a capture.
_WARM_UPS = 3


class RecordedStep:
    """A captured step: calling it replays the graph and returns the step's results.

    The results are the same tensors every time, overwritten by the next replay.
    """

    def __init__(self, graph: Any, results: object) -> None:
        self._graph = graph
        self._results = results

    def __call__(self) -> object:
        """Queue the graph on the current stream, and return the captured results."""
        self._graph.replay()
        return self._results


class GraphRecorder:
    """Captures steps of one platform; all graphs share one memory pool.

    Graphs of one pool reuse each other's memory, so they must be replayed one after the other on
    one stream. The results of a graph stay valid as long as the graph exists.

    Args:
        module: torch's module for the platform's devices, with ``Stream``, ``stream``,
            ``current_stream``, ``current_device``, ``synchronize``, ``graph`` and
            ``graph_pool_handle``.
        graph_type: the module's graph class.
    """

    def __init__(self, module: Any, graph_type: Callable[[], Any]) -> None:
        self._module = module
        self._graph_type = graph_type
        self._streams: dict[int, Any] = {}

    def record(self, step: Callable[[], object]) -> RecordedStep:
        """Run ``step`` to warm up, then capture the step as a graph of the current device.

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
        """Return the stream of the current device for warm-up and capture.

        The default stream cannot be captured. Warm-up, capture and all steps use the same stream: a
        library that initialises once per stream (pytorch/pytorch, pull request 187745) would
        otherwise allocate during a capture, where no allocation is allowed.
        """
        device = self._module.current_device()
        if device not in self._streams:
            self._streams[device] = self._module.Stream()
        return self._streams[device]
