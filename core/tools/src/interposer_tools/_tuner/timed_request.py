"""The calls to time for one request of a model, with arguments for kernels or backends."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree

from interposer import (
    AttentionBackend,
    AttentionSpec,
    Candidate,
    Case,
    Config,
    CustomOp,
    Planned,
    Request,
    Resolver,
    Site,
)
from interposer.records import Kernel
from interposer_testing import result_faults
from interposer_testing.timing import KernelProcesses, TimedKernel, can_travel
from interposer_testing.workload import (
    moved_batch,
    random_projections,
    random_scales,
    random_sinks,
    typical_step,
)

Call = Callable[[], object]
Timer = Callable[[], float]

# Number of the values for the comparison with the reference, which no timed round has.
_COMPARED = 1 << 20


class TimedRequest(ABC):
    """One request of a plan, with arguments for each number of tokens."""

    def __init__(self, plan: Planned, request: Request, tokens: Sequence[int]) -> None:
        self.plan = plan
        self.request = request
        self.tokens = tuple(tokens)
        self.device = plan.resolver.device.torch_device
        self.dtype: torch.dtype = getattr(torch, request.dtype)

    @abstractmethod
    def calls(self, candidate: Candidate) -> list[Call]:
        """Load and prepare ``candidate``; return one call per number of tokens.

        Raises: NoCandidateError: the candidate cannot be loaded, or fails the canary.
        """

    @abstractmethod
    def in_process_reason(self, candidate: Candidate) -> str:
        """Return why a candidate must be timed in this process; "" if any process will do."""

    @abstractmethod
    def refresh(self, index: int, number: int) -> None:
        """Change the values of the arguments of the calls for one number of tokens.

        Args:
            index: index of the number of tokens.
            number: number of the values.
        """

    def faults(self, index: int, candidate: Candidate, call: Call) -> list[str]:
        """Make a call with new argument values, and compare the result with the reference.

        Returns: the faults; empty if there is no reference to compare with.
        """
        del index, candidate, call
        return []

    def resolver(self, **rules: Any) -> Resolver:
        """Return a copy of the plan's resolver with ``rules`` instead of the user's rules."""
        resolver = self.plan.resolver
        # Reset the user's rules, which could refuse the candidate that is to be timed.
        changes: dict[str, Any] = {"layers": {}, "require": (), "strict": False, **rules}
        config = _changed(resolver.config, fallback=False, **changes)
        trusted = frozenset({self.plan.placement.choice.chosen.provider})
        return Resolver(resolver.registry, resolver.device, config, trusted=trusted)


class TimedKernels(TimedRequest):
    """The calls of an op's kernels, on arguments from the op's sampler."""

    def __init__(
        self, plan: Planned, request: Request, tokens: Sequence[int], op: CustomOp[..., Any]
    ) -> None:
        super().__init__(plan, request, tokens)
        self.op = op
        self.target: str = plan.resolver.registry.ops[request.name].target
        assert op.sample is not None
        self.constants: dict[str, Any] = {}
        self.arguments = []
        for count in self.tokens:
            arguments = dict(op.sample(self.dtype, request.dims, count, 0).arguments)
            # Weights do not depend on the number of tokens, so one copy of them is enough.
            weights = {name: arguments.pop(name) for name in op.constants}
            self.constants = self.constants or _moved(weights, self.device)
            self.arguments.append(_moved(arguments, self.device))

    def calls(self, candidate: Candidate) -> list[Call]:
        """Return one call per number of tokens; all calls share the prepared constants."""
        pin = {self.op.name: candidate.qualified_name}
        resolver = self.resolver(kernels=pin, attention={}, tables=False)
        kernel = resolver.kernel(self.op, self.dtype, self.request.dims, self.request.prefix)
        # Prepared before timing, because a layer prepares its weights only once.
        prepared = kernel.prepared(**self.constants)
        return [
            partial(kernel.function, *self.op.signature.bind(**{**arguments, **prepared}).args)
            for arguments in self.arguments
        ]

    def in_process_reason(self, candidate: Candidate) -> str:
        """Return why a candidate must be timed in this process; "" if any process will do."""
        if self.device != "cpu":
            return f"because no other process can read results on {self.device}"
        if sys.platform != "linux":
            return f"because {sys.platform} has no memory that processes share as on Linux"
        if self.plan.resolver.registry.owner(candidate).source.installed is None:
            return "because a plugin that is registered in code exists in this process only"
        for name, value in {**self.arguments[0], **self.constants}.items():
            if not can_travel(value):
                kind = type(value).__name__
                return f"because {name!r} of {self.op.name!r} is a {kind}, which cannot be sent"
        return ""

    def separate(
        self, candidate: Candidate, processes: KernelProcesses, timer: Timer
    ) -> TimedKernel:
        """Load and prepare ``candidate`` in the process of its distribution.

        Raises:
            RefusedTimesError: the candidate cannot be loaded or prepared.
            NoCandidateError: the candidate fails the canary.
        """
        pin = {self.op.name: candidate.qualified_name}
        self.resolver(kernels=pin, attention={}, tables=False).check(self.request)
        record = candidate.record
        target, prepare, extra_roundings = f"{self.target}.reference", "", 0
        if isinstance(record, Kernel):
            target, prepare = record.target, record.prepare
            extra_roundings = record.extra_roundings
        return TimedKernel(
            candidate.qualified_name,
            self.op.allowing(extra_roundings),
            processes.of(candidate.provider),
            target,
            prepare,
            self.draw(0, 0),
            timer,
        )

    def draw(self, index: int, seed: int) -> Case:
        """Draw arguments for a number of tokens."""
        assert self.op.sample is not None
        return self.op.sample(self.dtype, self.request.dims, self.tokens[index], seed)

    def refresh(self, index: int, number: int) -> None:
        """Draw new values for the arguments, except for the op's constants."""
        values = self.draw(index, number).arguments
        for name, argument in self.arguments[index].items():
            if isinstance(argument, torch.Tensor) and 0 not in argument.stride():
                argument.copy_(values[name])

    def faults(self, index: int, candidate: Candidate, call: Call) -> list[str]:
        """Make a call with new argument values, and compare the result with the reference."""
        op = self.op.allowing(getattr(candidate.record, "extra_roundings", 0))
        self.refresh(index, _COMPARED)
        result = _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, call())
        case = self.draw(index, _COMPARED)
        constants = {name: case.arguments[name] for name in self.op.constants}
        constants |= {n: _on_host(value) for n, value in self.constants.items()}
        case = replace(case, arguments={**case.arguments, **constants})
        arguments = {n: _on_host(v) for n, v in self.arguments[index].items()}
        return [str(fault) for fault in result_faults(op, case, arguments, result)]


class TimedAttention(TimedRequest):
    """The calls of attention backends on typical steps. ``plan`` is not timed."""

    def __init__(self, plan: Planned, request: Request, tokens: Sequence[int]) -> None:
        super().__init__(plan, request, tokens)
        self.projections: list[list[torch.Tensor]] = [[] for _ in self.tokens]

    def in_process_reason(self, candidate: Candidate) -> str:
        """Return the reason: attention backends take objects of this process, such as plans."""
        del candidate
        return "because attention backends take objects of this process, such as plans"

    def refresh(self, index: int, number: int) -> None:
        """Rotate the values of the projections by one element; the same numbers cost the same."""
        del number
        for tensor in self.projections[index]:
            if tensor.is_floating_point():
                tensor.copy_(tensor.roll(1, -1))

    def backend(self, candidate: Candidate, resolver: Resolver | None = None) -> AttentionBackend:
        """Build the backend, with kernels selected by configuration and measurements."""
        spec = self._spec
        if resolver is None:
            resolver = self.bound_to(candidate)
        return resolver.attention(spec, Site(resolver, self.request.prefix, spec.dtype))

    def bound_to(self, candidate: Candidate) -> Resolver:
        """Return a resolver that always selects ``candidate`` for attention."""
        return self.resolver(attention={self.request.name: candidate.qualified_name}, tables=True)

    def calls(self, candidate: Candidate) -> list[Call]:
        """Return one call per number of tokens, on a KV cache of zeros."""
        backend, spec = self.backend(candidate), self._spec
        layout, generator = backend.kv_layout(), torch.Generator().manual_seed(0)
        calls: list[Call] = []
        for index, count in enumerate(self.tokens):
            batch, num_pages = typical_step(count, spec.page_size)
            if spec.prefix_lm and batch.max_query_tokens > 1:
                batch = replace(batch, prefix_lens=batch.seq_lens)
            # Zeros, because uninitialised memory may contain NaN or denormals, which are slower.
            (cache,) = layout.allocate(1, num_pages, self.device)
            cache.zero_()
            projections = random_projections(
                spec, len(batch.slots), generator, fused=False, batch=batch
            )
            plan = backend.plan(moved_batch(batch, self.device))
            query, key, value = (part.to(self.device) for part in projections)
            self.projections[index] += [query, key, value]
            options: dict[str, Any] = {}
            if spec.is_quantized:
                scales = (scale.to(self.device) for scale in random_scales(spec, generator))
                options["scales"] = backend.prepare_scales(*scales)
            if spec.sinks:
                options["sinks"] = random_sinks(spec, generator).to(self.device)
            if spec.type == "encoder_decoder":  # keys come from the encoder, not the step
                options["stored"] = True
                key = value = query[:0, : spec.num_kv_heads]
            calls.append(partial(backend.forward, query, key, value, cache, plan, **options))
        return calls

    @property
    def _spec(self) -> AttentionSpec:
        assert isinstance(self.request.detail, AttentionSpec)
        return self.request.detail


def _changed(config: Config, **changes: Any) -> Config:
    fields = {name: getattr(config, name) for name in config.model_fields_set}
    return Config(**{**fields, **changes})


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _moved(arguments: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Move tensors to ``device`` without changing strides."""
    return {
        name: _moved_tensor(value, device) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def _moved_tensor(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if tensor.device == torch.device(device):
        return tensor
    # ``to`` makes a strided view contiguous, so move the whole storage and view it again.
    length = tensor.untyped_storage().nbytes() // tensor.dtype.itemsize
    storage = tensor.as_strided((length,), (1,), 0).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
