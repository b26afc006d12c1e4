"""A transformers decoder over paged KV caches, with the engine's interface.

The model's own forward runs without a cache, with the tokens of all sequences in one row. Each
attention layer writes its keys and values to pages, and attends over the pages.

A trial compares the logits with the model's logits without a cache. A prompt is computed in chunks
and token by token, together with a second sequence at the end of the context. State outside of
pages, or mixing between tokens of a row, changes the logits. The unsupported layer is the first
with different outputs for equal inputs.

Dimensions: N heads, K kv heads, D size of a query and key, E size of a value, T tokens of the step
or of the trial's prompt, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from interposer import AttentionBackend, Resolver, Site
from interposer.errors import ConfigError
from interposer_adapt._agreement import distance, error_bound, perturbed_logits, plain_logits
from interposer_adapt._attention_registry import configs_naming_attention, using_adapted_attention
from interposer_adapt._attention_trace import TracedLayer, UnsupportedLayerError
from interposer_adapt._forwards import AttentionCall, MakeMask, PagedCache, intercepted_by
from interposer_adapt._trial_length import extra_trial_tokens
from interposer_engine import SamplingParams
from interposer_engine.parts import Chunk, PagePool, StepBatch, TokenSequence
from interposer_models.decoder import EmbeddedRows
from interposer_ops.attention import common_page_size


class PagedLayer:
    """An attention layer of a transformers model, with the paged backend that computes it."""

    def __init__(self, traced: TracedLayer, resolver: Resolver, page_size: int) -> None:
        self.name = traced.name
        self.spec = traced.spec(page_size)
        site = Site(resolver, traced.name, traced.dtype)
        self.backend: AttentionBackend = resolver.attention(self.spec, site)
        self._value_size = traced.value_size

    def attend(self, call: AttentionCall, cache: Tensor, plan: object) -> Tensor:
        """Write the keys and values of the step to pages, and attend, ``[1, T, N, E]``."""
        query, key, value = (self._rows(states) for states in (call.query, call.key, call.value))
        sinks = {"sinks": call.options["s_aux"].to(self.spec.dtype)} if self.spec.sinks else {}
        out = self.backend.forward(query, key, value, cache, plan, **sinks)
        return out[..., : self._value_size].unsqueeze(0)

    def _rows(self, states: Tensor) -> Tensor:
        """Return ``[1, N, T, D]`` as ``[T, N, D]``, padded to the head size in pages."""
        rows = states[0].transpose(0, 1)
        num_padded = self.spec.head_size - rows.shape[-1]
        return pad(rows, (0, num_padded)) if num_padded else rows.contiguous()


class _PagedStep:
    """Interceptor of one step, which lets every layer attend to its paged KV cache."""

    def __init__(
        self,
        layers: Mapping[int, tuple[int, PagedLayer]],
        caches: Sequence[Tensor],
        plans: Sequence[object],
    ) -> None:
        self._layers, self._caches, self._plans = layers, caches, plans

    def mask(self, make: MakeMask, settings: Mapping[str, Any]) -> Tensor | None:
        """Return None instead of a mask: the trace has recorded the mask pattern of each layer."""
        return None

    def paged_cache(self, module: nn.Module) -> PagedCache | None:
        """Return the paged cache of a layer; None for a module that was not traced."""
        index_and_layer = self._layers.get(id(module))
        if index_and_layer is None:
            return None
        index, layer = index_and_layer
        return layer.backend, self._caches[index], self._plans[index]

    def attend(self, call: AttentionCall) -> Tensor:
        """Attend to the paged cache of the call's layer, ``[1, T, N, E]``."""
        index, layer = self._layers[id(call.module)]
        return layer.attend(call, self._caches[index], self._plans[index])


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """The model sizes against which the engine checks requests.

    Attributes:
        hidden_size: size of the vectors of images; None if the model takes none.
        mrope_section: sections of the rotary angles by time, height and width; None if tokens have
            one position.
    """

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int | None = None
    mrope_section: Sequence[int] | None = None


class PagedDecoder:
    """The engine's interface ``PagedModel``, implemented by a transformers model.

    Attributes:
        model: the model of transformers.
        attention_layers: the attention layers, in the order of calls.
        has_logits_to_keep: the model's forward can compute the logits of some rows only.
    """

    model: Any

    def __init__(
        self,
        model: nn.Module,
        traced: Sequence[TracedLayer],
        resolver: Resolver,
        config: DecoderSizes,
        in_force: Callable[[], bool],
    ) -> None:
        """Choose an attention backend for each layer.

        Args:
            in_force: returns False once the model was restored.
        Raises: NoCandidateError: no backend supports a layer.
        """
        self.model = model
        self.config = config
        sites = [(layer.spec(1), Site(resolver, layer.name, layer.dtype)) for layer in traced]
        self.page_size = common_page_size(resolver, sites)
        self.attention_layers = [PagedLayer(layer, resolver, self.page_size) for layer in traced]
        numbered = enumerate(self.attention_layers)
        modules = (layer.module for layer in traced)
        self._layers = {id(m): entry for m, entry in zip(modules, numbered, strict=True)}
        self._configs = configs_naming_attention(model, [layer.name for layer in traced])
        self._in_force = in_force
        self.has_logits_to_keep = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def takes_embeddings(self) -> bool:
        """Say whether vectors of images can replace token embeddings."""
        return self.config.hidden_size is not None

    def reserve_positions(self, count: int, device: str) -> None:
        """Do nothing: the model's forward computes the rotary angles of each step."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        caches: Sequence[Tensor],
        plans: Sequence[object],
        rows: Tensor | None = None,
        embedded: EmbeddedRows | None = None,
    ) -> Tensor:
        """Compute the logits of the tokens in ``rows``, or of all tokens; see ``CausalLM``."""
        if not self._in_force():
            raise ConfigError("The model was restored. Try: language_model(adapt(model))")
        row_arguments = (
            {} if rows is None or not self.has_logits_to_keep else {"logits_to_keep": rows}
        )
        with (
            # Adapted attention for all layers: eager and sdpa know nothing of pages.
            using_adapted_attention(self._configs),
            intercepted_by(_PagedStep(self._layers, caches, plans)),
        ):
            inputs = {"input_ids": token_ids[None]}
            if embedded is not None:
                vectors = self.model.get_input_embeddings()(token_ids)
                inputs = {"inputs_embeds": embedded.replace_embeddings(vectors)[None]}
            out = self.model(
                **inputs,
                # [1, T], or [3, 1, T] in M-RoPE.
                position_ids=positions.unsqueeze(-2),
                use_cache=False,
                return_dict=True,
                **row_arguments,
            )
        logits: Tensor = out.logits[0]
        return logits if rows is None or row_arguments else logits[rows]


# Tokens of the prompt and of the second sequence in each step; odd steps reverse their order.
_STEPS = ((5, 3), (4, 2), (1, 1), (1, 1), (1, 1), (1, 0))
_OUTPUT_PREFIX = "out "
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)

States = dict[tuple[str, int, str], Tensor]
"""Inputs and outputs ``[T, ...]`` by module, number of the call, and argument or result."""


def try_paging(
    paged: PagedDecoder, device: str, numerics: Callable[[], AbstractContextManager[None]]
) -> None:
    """Raise an error unless the paged decoder's logits agree with the model's for every token.

    The effect of one rounding at the embeddings is measured; ``error_bound`` derives the allowed
    distance.

    Raises: UnsupportedLayerError: logits differ, or the model fails on rows of several sequences.
    """
    vocabulary, context = paged.config.vocab_size, paged.config.max_position_embeddings
    num_tokens = sum(num_tokens for num_tokens, _ in _step_tokens(paged))
    prompt = [(7 * i + 3) % vocabulary for i in range(min(num_tokens, context))]
    with numerics(), torch.inference_mode():
        expected = plain_logits(paged.model, prompt, device)
        perturbed = perturbed_logits(paged.model, prompt, device)
        try:
            actual = _logits_in_steps(paged, prompt, device)
        except FAILURES as error:
            if isinstance(error, UnsupportedLayerError):
                raise
            reason = f"fails on a row of several sequences: {type(error).__name__}: {error}"
            raise UnsupportedLayerError("", type(paged.model).__name__, reason) from error
        max_distance = error_bound(paged.model, expected, perturbed, len(paged.attention_layers))
        # Negated, so that NaN fails the trial.
        if not distance(actual, expected) <= max_distance:
            raise _find_unsupported_layer(paged, prompt, device, max_distance)


def _step_tokens(paged: PagedDecoder) -> tuple[tuple[int, int], ...]:
    """Return the number of tokens that each trial step adds to both of its sequences."""
    (count, second), *later_steps = _STEPS
    extra_tokens, _ = extra_trial_tokens(paged.model)
    return ((count + extra_tokens, second), *later_steps)


def _logits_in_steps(
    paged: PagedDecoder, prompt: list[int], device: str, states: list[States] | None = None
) -> Tensor:
    """Compute the logits ``[T, V]`` of the prompt by the paged decoder.

    Args:
        states: receives the recorded states of the prompt's tokens, one entry for each step.
    """
    size, context = paged.page_size, paged.config.max_position_embeddings
    steps_tokens = _step_tokens(paged)
    second_length = min(sum(count for _, count in steps_tokens), context)
    pool = PagePool(2 * -(-max(len(prompt), second_length) // size), size)
    caches = [
        layer.backend.kv_layout().allocate(1, pool.num_pages, device)[0]
        for layer in paged.attention_layers
    ]
    vocabulary = paged.config.vocab_size
    second_prompt = [(5 * i + 1) % vocabulary for i in range(second_length)]
    sequences = [
        TokenSequence(i, tokens, SamplingParams(), 0)
        for i, tokens in enumerate((prompt, second_prompt))
    ]
    step_logits = []
    for number, step_tokens in enumerate(steps_tokens):
        chunks = []
        for sequence, count in zip(sequences, step_tokens, strict=True):
            num_tokens = min(count, len(sequence) - sequence.num_computed)
            if num_tokens:
                pool.extend(sequence.pages[0], sequence.num_computed + num_tokens)
                chunks.append(Chunk(sequence, num_tokens))
        # The order of sequences in a row must not matter.
        if number % 2:
            chunks.reverse()
        if not chunks:
            break
        batch = StepBatch.build(chunks, size, device)
        owners = [chunk.sequence.id for chunk in chunks for _ in range(chunk.num_tokens)]
        sequence_ids = torch.tensor(owners, device=device)
        # The second sequence ends at the end of the context, to expose angles that depend on the
        # longest sequence.
        position_offsets = sequence_ids * (context - second_length)
        batch = replace(batch, positions=batch.positions + position_offsets)
        prompt_rows = (sequence_ids == 0).nonzero()[:, 0]
        plans = {layer.backend: None for layer in paged.attention_layers}
        plan_by_backend = {backend: backend.plan(batch.attention) for backend in plans}
        recording: AbstractContextManager[States] = nullcontext({})
        if states is not None:
            recording = _recording(paged.model, len(owners))
        with recording as recorded_states:
            logits = paged(
                batch.token_ids,
                batch.positions,
                caches,
                [plan_by_backend[layer.backend] for layer in paged.attention_layers],
            )
        if states is not None:
            states.append({key: tokens[prompt_rows] for key, tokens in recorded_states.items()})
        step_logits.append(logits[prompt_rows])
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.num_tokens
    return torch.cat(step_logits)


def _find_unsupported_layer(
    paged: PagedDecoder, prompt: list[int], device: str, max_distance: float
) -> UnsupportedLayerError:
    """Return the error for the first module whose outputs differ although its inputs are equal."""
    with _recording(paged.model, len(prompt)) as expected:
        plain_logits(paged.model, prompt, device)
    steps: list[States] = []
    _logits_in_steps(paged, prompt, device, steps)
    kinds = {name: type(module).__name__ for name, module in paged.model.named_modules()}
    reason = "computes something else with a paged cache: it keeps a state that pages do not hold"
    differing_calls: set[tuple[str, int]] = set()
    for key, expected_states in expected.items():
        name, call, position = key
        parts = [step[key] for step in steps if key in step]
        if len(parts) < len(steps) or len({part.shape[1:] for part in parts}) > 1:
            continue
        joined = torch.cat(parts)
        if (
            joined.shape == expected_states.shape
            and not distance(joined, expected_states) <= max_distance
        ):
            if position.startswith(_OUTPUT_PREFIX) and (name, call) not in differing_calls:
                return UnsupportedLayerError(name, kinds[name], reason)
            differing_calls.add((name, call))
    return UnsupportedLayerError("", type(paged.model).__name__, reason)


@contextmanager
def _recording(model: nn.Module, num_tokens: int) -> Iterator[States]:
    """Record all per-token inputs and outputs of the model's modules, in order of completion."""
    states: States = {}
    calls: dict[str, int] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
            call = calls[name] = calls.get(name, -1) + 1
            tensors = {f"in {position}": value for position, value in enumerate(args)}
            tensors |= {f"in {position}": value for position, value in kwargs.items()}
            results = out if isinstance(out, tuple | list) else (out,)
            tensors |= {
                f"{_OUTPUT_PREFIX}{position}": value for position, value in enumerate(results)
            }
            for position, value in tensors.items():
                if (
                    isinstance(value, Tensor)
                    and value.is_floating_point()
                    and value.shape[:2] == (1, num_tokens)
                ):
                    states[name, call, position] = value[0].clone()

        return hook

    hooks = [
        module.register_forward_hook(note(name), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()
