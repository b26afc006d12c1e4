"""Decode steps as captured graphs: one graph per bucket, captured at first use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from interposer import AttentionBackend, Verdict
from interposer.errors import ConfigError, GraphError, described, foreign_errors
from interposer_models._engine.batch import StepBatch
from interposer_models._engine.graph_batch import GraphBatch
from interposer_models._engine.graph_buckets import Bucket, GraphBuckets
from interposer_ops.devices.graphs import judge_compilation

Plans = Mapping[AttentionBackend, Any]
"""Plans of the attention backends that plan on the host; other backends plan within the step."""

Results = torch.Tensor | tuple[torch.Tensor, ...]
"""One tensor or several, each with one row per token."""

Step = Callable[[StepBatch, Plans], Results]
"""Computes the results of a batch."""

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""``Platform.capture_graph``."""


class _Captured(NamedTuple):
    batch: GraphBatch
    plans: Plans
    replay: Callable[[], object]


class DecodeGraphs:
    """Runs a step of one token per sequence through the captured graph of the bucket.

    Attributes:
        compiled: Accepts; or refuses with the reason if torch.compile compiles part of the model,
            which then runs without graphs because the compiler may capture graphs, too.
    """

    def __init__(
        self,
        step: Step,
        capture: Capture,
        buckets: GraphBuckets,
        *,
        page_size: int,
        spare_pages: Sequence[Sequence[int]],
        device: str,
        backends: Mapping[AttentionBackend, int] | None = None,
        model: nn.Module | None = None,
        required: bool = False,
        with_states: bool = False,
        with_encoder: bool = False,
    ) -> None:
        """Prepare the captures, which happen at the first steps.

        Args:
            step: The function to capture. The function must read only arguments and memory that
                never moves.
            capture: ``Platform.capture_graph``.
            buckets: Batch sizes to capture.
            spare_pages: For each page pool, pages that no sequence gets; see ``pages_for``.
            backends: The attention backends within ``step``, with the index of the page pool of
                each. Backends that plan on the host plan before each replay, others within the
                graph.
            model: The model within ``step``, which is checked for torch.compile before each
                capture.
            required: Whether a failed capture raises instead of running without graphs.
            with_states, with_encoder: See ``GraphBatch``.
        """
        self.buckets = buckets
        self.compiled = Verdict.accept()
        self._step = step
        self._capture = capture
        self._memory = (page_size, spare_pages, device, with_states, with_encoder)
        self._model = model
        self._required = required
        pool_indices = backends or {}
        self._planners = {
            backend: pool_index
            for backend, pool_index in pool_indices.items()
            if backend.plans_on_host
        }
        self._graphs: dict[Bucket, _Captured] = {}

    def __len__(self) -> int:
        """Return the number of captured graphs."""
        return len(self._graphs)

    @staticmethod
    def pages_for(buckets: GraphBuckets, page_size: int) -> int:
        """Return the number of spare pages that padding needs."""
        return -(-buckets.sizes[-1] // page_size)

    def run(self, batch: StepBatch) -> Results:
        """Compute the results of ``step``, through a graph if the batch fits a bucket.

        The next step overwrites the returned tensors.

        Raises:
            GraphError: the step cannot be captured.
            ConfigError: graphs are required, but torch.compile compiles part of the model.
        """
        attention = batch.attention
        # Graphs hold exactly one token per sequence, so steps with prompt chunks or draft tokens
        # are eager.
        decodes = attention.max_query_tokens == 1 and len(batch.token_ids) == len(
            attention.seq_lens
        )
        bucket = self.buckets.bucket_for(*attention.page_table.shape) if decodes else None
        if bucket is None:
            return self._step(batch, {})
        if bucket not in self._graphs:
            self.compiled = self._judge()
            if not self.compiled:
                return self._step(batch, {})
            self._graphs[bucket] = self._captured(bucket)
        graph_batch, plans, replay = self._graphs[bucket]
        count = graph_batch.fill(batch)
        # Backends that plan on the host update their plans outside of the graph.
        for backend, plan in plans.items():
            backend.update_plan(plan, graph_batch.step.by_pool[self._planners[backend]])
        results = replay()
        if isinstance(results, tuple):
            return tuple(result[:count] for result in results)
        assert isinstance(results, torch.Tensor)
        return results[:count]

    def forget(self) -> None:
        """Drop all graphs because the captured memory has moved; later steps capture new ones."""
        self._graphs.clear()

    def _judge(self) -> Verdict:
        verdict = Verdict.accept() if self._model is None else judge_compilation(self._model)
        if self._required and not verdict:
            raise ConfigError(f"graphs='on' was asked for, but {verdict.reason}")
        return verdict

    def _captured(self, bucket: Bucket) -> _Captured:
        graph_batch = GraphBatch(bucket, *self._memory)
        try:
            batches = graph_batch.step.by_pool
            plans = {
                backend: backend.plan_fixed(batches[pool_index])
                for backend, pool_index in self._planners.items()
            }
            replay = self._capture(lambda: self._step(graph_batch.step, plans))
        except foreign_errors() as error:
            raise GraphError(
                f"a decode step of {bucket.num_sequences} sequences could not be captured, though "
                f"all that runs in it promises to be graph_safe: {described(error)}. "
                "Try: Config(graphs='off')"
            ) from error
        return _Captured(graph_batch, plans, replay)
