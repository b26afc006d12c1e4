"""Decode steps as graphs: one for each bucket, captured when it is first wanted."""

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
"""The plans of backends that plan on the host; others plan within the step."""

Results = torch.Tensor | tuple[torch.Tensor, ...]
"""One result or several, each with a row per token."""

Step = Callable[[StepBatch, Plans], Results]
"""From a batch to what is computed of it."""

Capture = Callable[[Callable[[], object]], Callable[[], object]]
"""``Platform.capture_graph``."""


class _Captured(NamedTuple):
    held: GraphBatch
    plans: Plans
    replay: Callable[[], object]


class DecodeGraphs:
    """Runs a step of one token per sequence through the graph of its bucket.

    Attributes:
        compiled: accepts, or says why this model runs without graphs though it was to have some:
            torch.compile has a part in it, which may capture graphs itself.
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
        with_sources: bool = False,
    ) -> None:
        """Capture nothing yet.

        Args:
            step: what is captured; it must read nothing but its arguments and what never moves.
            capture: of the platform.
            spare_pages: of each pool, pages that no sequence is given, see ``pages_for``.
            backends: what attends in ``step``, and of which pool its pages are. Those that plan on
                the host plan a step before its graph is replayed, others within.
            model: what ``step`` calls, to be looked at before each capture.
            required: what cannot be captured raises.
            with_states, with_sources: see ``GraphBatch``.
        """
        self.buckets = buckets
        self.compiled = Verdict.accept()
        self._step = step
        self._capture = capture
        self._memory = (page_size, spare_pages, device, with_states, with_sources)
        self._model = model
        self._required = required
        places = backends or {}
        self._planners = {each: place for each, place in places.items() if each.plans_on_host}
        self._graphs: dict[Bucket, _Captured] = {}

    def __len__(self) -> int:
        """Return how many graphs are captured."""
        return len(self._graphs)

    @staticmethod
    def pages_for(buckets: GraphBuckets, page_size: int) -> int:
        """Return how many spare pages padding needs."""
        return -(-buckets.sizes[-1] // page_size)

    def run(self, batch: StepBatch) -> Results:
        """Return the results of ``step``, through a graph if one fits.

        What is returned is overwritten by the next step.

        Raises:
            GraphError: the step cannot be captured.
            ConfigError: graphs are required, and torch.compile has a part in the model.
        """
        paged = batch.attention
        decodes = paged.max_query_tokens == 1 and len(batch.token_ids) == len(paged.seq_lens)
        bucket = self.buckets.bucket_for(*paged.page_table.shape) if decodes else None
        if bucket is None:
            return self._step(batch, {})
        if bucket not in self._graphs:
            self.compiled = self._judge()
            if not self.compiled:
                return self._step(batch, {})
            self._graphs[bucket] = self._captured(bucket)
        held, plans, replay = self._graphs[bucket]
        count = held.fill(batch)
        for backend, plan in plans.items():
            backend.update_plan(plan, held.step.by_pool[self._planners[backend]])
        results = replay()
        if isinstance(results, tuple):
            return tuple(each[:count] for each in results)
        assert isinstance(results, torch.Tensor)
        return results[:count]

    def forget(self) -> None:
        """Drop all graphs, since what they read has moved; they are captured again when wanted."""
        self._graphs.clear()

    def _judge(self) -> Verdict:
        verdict = Verdict.accept() if self._model is None else judge_compilation(self._model)
        if self._required and not verdict:
            raise ConfigError(f"graphs='on' was asked for, but {verdict.reason}")
        return verdict

    def _captured(self, bucket: Bucket) -> _Captured:
        held = GraphBatch(bucket, *self._memory)
        try:
            batches = held.step.by_pool
            plans = {b: b.plan_fixed(batches[place]) for b, place in self._planners.items()}
            replay = self._capture(lambda: self._step(held.step, plans))
        except foreign_errors() as error:
            raise GraphError(
                f"a decode step of {bucket.num_sequences} sequences could not be captured, though "
                f"all that runs in it promises to be graph_safe: {described(error)}. "
                "Try: Config(graphs='off')"
            ) from error
        return _Captured(held, plans, replay)
