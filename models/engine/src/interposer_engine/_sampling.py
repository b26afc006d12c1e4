"""Edits of logits (bias, minimum length, constraints), and top log probabilities.

Dimensions: B sequences, V vocabulary.

Sampling parameters and used tokens of the decoding sequences, kept on the device.

Dimensions: B sequences, V vocabulary.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from interposer import CustomOp
from interposer.errors import InterposerError, RequestError
from interposer_engine._constrained_decoding.constraints import Constraints, Matcher
from interposer_engine._embedded_input import EmbeddedInput, PromptTokens
from interposer_engine._sampling_fields import Draw, LogitEdit, Penalty
from interposer_engine._sampling_params import SamplingParams, marked_fields
from interposer_engine._sequence import TokenSequence
from interposer_engine._speech.logit_masks import check_transcript, mask_transcripts
from interposer_ops.layers.logit_edits import LogitEdits
from interposer_ops.layers.sampler import Penalties, Sampler, SamplingBatch


def is_listing(value: object) -> bool:
    """Return whether a value lists items in an order, such as a list, array or generator."""
    return hasattr(value, "__iter__") and not isinstance(
        value, bytes | bytearray | memoryview | Mapping | Set
    )


def checked_tokens(token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Check token ids, and return plain integers.

    Accepts every type that Python can use as an index, such as elements of arrays.

    Raises: RequestError: there is no token, or a token is not in the vocabulary.
    """
    if not is_listing(token_ids):
        raise RequestError(
            f"The prompt is {token_ids!r:.100} of the type {type(token_ids).__name__}, "
            "must be a text or a list of token ids"
        )
    tokens = [_integer(token_id) for token_id in token_ids]
    if not tokens:
        raise RequestError("The prompt is empty. Try: give at least one token")
    for token_id in tokens:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"Token id {token_id} is outside the vocabulary of {vocab_size}")
    return tokens


def checked_prompt(prompt: PromptTokens, vocab_size: int) -> list[int | EmbeddedInput]:
    """Check token ids and encoded runs, and return plain integers and the runs.

    Raises: RequestError: as ``checked_tokens``.
    """
    parts = [*prompt] if is_listing(prompt) else []
    if not any(isinstance(part, EmbeddedInput) for part in parts):
        # A prompt that lists nothing is refused by its type.
        return [*checked_tokens(cast("Sequence[int]", parts or prompt), vocab_size)]
    return [
        part if isinstance(part, EmbeddedInput) else checked_tokens([part], vocab_size)[0]
        for part in parts
    ]


def chosen_params(
    params: SamplingParams | Sequence[SamplingParams] | None, settings: dict[str, Any], count: int
) -> list[SamplingParams]:
    """Return the sampling parameters for each of ``count`` prompts.

    Raises: RequestError: both ``params`` and ``settings`` are set, or the numbers differ.
    """
    if params is not None and settings:
        raise RequestError(f"Give either params or single settings, not both: {sorted(settings)}")
    if params is None:
        return [SamplingParams(**settings)] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    params_list = list(params) if isinstance(params, Sequence) else [params]
    for item in params_list:
        if not isinstance(item, SamplingParams):
            raise RequestError(f"params holds {item!r}, must be SamplingParams, one or a list")
    if len(params_list) != count:
        raise RequestError(f"{len(params_list)} params were given for {count} prompts")
    return params_list


def sampling_batch(
    sequences: Sequence[TokenSequence],
    vocab_size: int,
    device: str,
    ahead: Sequence[int] | None = None,
) -> SamplingBatch:
    """Build the parameters for sampling one token per sequence, without penalties.

    Args:
        ahead: Number of tokens between the next token of a sequence and the token of the row, for
            each row; None for 0.
    """
    params = [sequence.params for sequence in sequences]
    if all(p.takes_likeliest for p in params):
        return SamplingBatch.greedy(len(params), device)
    # Noise is a function of seed and step, so a token draws the same noise in any batch.
    steps = [len(sequence.output) for sequence in sequences]
    if ahead is not None:
        steps = [step + offset for step, offset in zip(steps, ahead, strict=True)]
    columns: dict[str, Any] = {
        name: [getattr(p, name) for p in params] for name in marked_fields(Draw)
    }
    return SamplingBatch.build(
        **columns,
        seeds=[sequence.seed for sequence in sequences],
        steps=steps,
        device=device,
    )


def penalties_of(sequences: Sequence[TokenSequence], vocab_size: int, device: str) -> Penalties:
    """Build the penalty parameters of the sequences, with the counts of tokens used so far."""
    params = [sequence.params for sequence in sequences]
    columns: dict[str, Any] = {
        penalty.argument: [getattr(p, name) for p in params]
        for name, penalty in marked_fields(Penalty).items()
    }
    return Penalties.build(
        **columns,
        prompts=[sequence.prompt_token_ids for sequence in sequences],
        outputs=[sequence.output for sequence in sequences],
        vocab_size=vocab_size,
        device=device,
    )


def _integer(token_id: object) -> int:
    try:
        # Python's booleans are integers, but a boolean among token ids is a mistake.
        if not isinstance(token_id, bool):
            return operator.index(token_id)  # type: ignore[arg-type]
    except TypeError:
        pass
    if isinstance(token_id, EmbeddedInput):
        raise RequestError(
            f"The prompt holds an {token_id.kind}, but the model's encoder reads token ids. "
            "Try: give it as text"
        )
    raise RequestError(
        f"Token id {token_id!r} is not an integer. Try: lm.tokenizer.encode(text), or one prompt "
        "after the other"
    )


class NonFiniteError(InterposerError, ArithmeticError):
    """The model computed NaN or infinity, so the result is meaningless."""


def non_finite(result: str) -> NonFiniteError:
    """Return the error for a result, such as logits, that contains NaN or infinity.

    Args:
        result: Name of the result, with the position.
    """
    return NonFiniteError(
        f"{result} are not finite: the weights hold NaN or infinite numbers, or a layer computed "
        "some. Try: dtype='float32' if the model computes in float16; else copy the checkpoint "
        "again, and look for NaN in its tensors"
    )


_Value = TypeVar("_Value")


@dataclass(slots=True)
class CachedValue(Generic[_Value]):
    """Cache of one value that stays valid while consecutive steps run the same sequences."""

    sequences: tuple[TokenSequence, ...] = ()
    value: _Value | None = None

    def of(self, sequences: Sequence[TokenSequence], make: Callable[[], _Value]) -> _Value:
        """Return the value of ``sequences``, made by ``make`` if the sequences have changed."""
        if self.value is None or not is_same_batch(self.sequences, sequences):
            self.value, self.sequences = make(), tuple(sequences)
        return self.value


class SamplingState:
    """The sampling parameters of consecutive steps, updated on the device.

    If a step has the same sequences as the one before, only the new tokens are counted. If a
    sequence joins or leaves, the parameters are uploaded again, but token counts of the other
    sequences stay on the device.
    """

    def __init__(self, vocab_size: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._sequences: tuple[TokenSequence, ...] = ()
        self._num_counted: list[int] = []  # output tokens of each sequence that are in the batch
        self._batch: SamplingBatch | None = None

    def batch(self, sequences: Sequence[TokenSequence]) -> SamplingBatch:
        """Return the parameters for sampling one token per sequence.

        The next call changes the returned tensors.

        Args:
            sequences: Sequences of the step, of which at least one is not greedy.
        """
        if self._batch is not None:
            self._count_new_tokens(self._batch)
        if self._batch is None or not is_same_batch(self._sequences, sequences):
            self._batch = self._rebuild(sequences)
            self._sequences = tuple(sequences)
            self._num_counted = [len(sequence.output) for sequence in sequences]
        return self._batch

    def _count_new_tokens(self, batch: SamplingBatch) -> None:
        """Add the tokens that were appended since the last step to the counts of used tokens."""
        num_new = [
            len(s.output) - num_old
            for s, num_old in zip(self._sequences, self._num_counted, strict=True)
        ]
        if not any(num_new):
            return
        # In plain decoding every sequence gets one token, so a scalar suffices.
        if len({*num_new}) == 1:
            batch.steps.add_(num_new[0])
        else:
            batch.steps.add_(torch.tensor(num_new).to(self._device, non_blocking=True))
        if batch.penalties is not None:
            pairs = [
                (row, token)
                for row, (sequence, count) in enumerate(
                    zip(self._sequences, self._num_counted, strict=True)
                )
                for token in sequence.output[count:]
            ]
            indices = torch.tensor(pairs).T.to(self._device, non_blocking=True)
            counts = batch.penalties.output_counts
            ones = torch.ones(len(pairs), dtype=counts.dtype, device=counts.device)
            counts.index_put_(tuple(indices), ones, accumulate=True)
        self._num_counted = [
            num_old + num_added
            for num_old, num_added in zip(self._num_counted, num_new, strict=True)
        ]

    def _rebuild(self, sequences: Sequence[TokenSequence]) -> SamplingBatch:
        """Build the sampling parameters of other sequences, and reuse counts of known ones."""
        batch = sampling_batch(sequences, self._vocab_size, self._device)
        if not any(sequence.params.is_penalised for sequence in sequences):
            return batch
        old_penalties = None if self._batch is None else self._batch.penalties
        old_rows = (
            {} if old_penalties is None else {s: row for row, s in enumerate(self._sequences)}
        )
        new_sequences = [sequence for sequence in sequences if sequence not in old_rows]
        new_penalties = (
            penalties_of(new_sequences, self._vocab_size, self._device) if new_sequences else None
        )
        if old_penalties is None or len(new_sequences) == len(sequences):
            return replace(batch, penalties=new_penalties)
        row_by_sequence = {
            sequence: len(old_rows) + row for row, sequence in enumerate(new_sequences)
        } | old_rows
        rows = torch.tensor(
            [row_by_sequence[sequence] for sequence in sequences], device=self._device
        )
        return replace(batch, penalties=_select_rows(old_penalties, new_penalties, rows))


def is_same_batch(first: Sequence[TokenSequence], second: Sequence[TokenSequence]) -> bool:
    """Return whether two lists hold the same sequences in the same order."""
    return len(first) == len(second) and all(a is b for a, b in zip(first, second, strict=True))


def _select_rows(old: Penalties, new: Penalties | None, rows: Tensor) -> Penalties:
    """Select rows of two concatenated penalties; rows of ``new`` follow those of ``old``."""
    names = Penalties.__dataclass_fields__
    if new is None:
        return Penalties(*(getattr(old, name)[rows] for name in names))
    return Penalties(*(torch.cat([getattr(old, n), getattr(new, n)])[rows] for n in names))


_NO_TOKEN = -1


def _column_edits(params: Sequence[SamplingParams]) -> dict[str, CustomOp[..., Tensor]]:
    """Return the op of each per-row logit edit that any of ``params`` uses, by parameter name."""
    return {
        name: edit.op
        for name, edit in marked_fields(LogitEdit).items()
        if edit.op is not None and any(p.is_changed(name) for p in params)
    }


class RequestEdits:
    """Edits the logits of requests before sampling, and records the most likely tokens."""

    def __init__(
        self, sampler: Sampler, vocab_size: int, stop_token_ids: frozenset[int], device: str
    ) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._stop_token_ids = stop_token_ids
        self._device = device
        self._biases: CachedValue[tuple[torch.Tensor, torch.Tensor]] = CachedValue()
        self._min_lengths: CachedValue[tuple[torch.Tensor, torch.Tensor]] = CachedValue()
        self._columns: CachedValue[tuple[tuple[CustomOp[..., Tensor], Tensor], ...]] = CachedValue()

    def check(self, params: SamplingParams, constraints: Constraints | None) -> None:
        """Raise RequestError if the engine cannot apply the parameters of a request."""
        for token in params.logit_bias:
            if token >= self._vocab_size:
                raise RequestError(
                    f"logit_bias holds the token id {token}, which is outside the vocabulary of "
                    f"{self._vocab_size}"
                )
        if params.min_tokens and len(self._end_tokens(params)) >= self._vocab_size:
            raise RequestError(
                "min_tokens rules out every token, since each of them ends the request. "
                "Try: fewer stop_token_ids"
            )
        if params.transcript is not None:
            reason = check_transcript(params.transcript, self._vocab_size)
            if reason:
                raise RequestError(f"transcript {reason}. Try: lm.transcribe(audio)")
        if params.constraint is not None:
            self._matcher(params, constraints)

    def prepare(self, params: SamplingParams, constraints: Constraints | None) -> Matcher | None:
        """Bind the kernels that a request's edits need, and return the matcher of its constraint.

        Raises: InterposerError: the policy leaves no kernel for one of the parameters.
        """
        self._sampler.editor.prepare(
            bias=bool(params.logit_bias),
            least=bool(params.min_tokens),
            bitmask=params.constraint is not None,
            top=bool(params.top_logprobs),
            ops=_column_edits([params]).values(),
        )
        return None if params.constraint is None else self._matcher(params, constraints)

    def edit(
        self,
        sequences: list[TokenSequence],
        logits: torch.Tensor,
        batch: SamplingBatch,
        constraints: Constraints | None,
    ) -> torch.Tensor:
        """Return the edited logits ``[B, V]``, from which the next tokens are drawn."""
        params = [sequence.params for sequence in sequences]
        if not any(p.edits_logits for p in params):
            return logits
        if any(p.transcript is not None for p in params):
            logits = mask_transcripts(logits, sequences)
        bias = min_lengths = None
        if any(p.logit_bias for p in params):
            bias = self._biases.of(sequences, lambda: self._bias_tensors(params))
        if any(p.min_tokens for p in params):
            min_lengths = (
                batch.steps,
                *self._min_lengths.of(sequences, lambda: self._min_length_tensors(params)),
            )
        edits = LogitEdits(
            bias,
            min_lengths,
            self._bitmask(sequences, constraints),
            self._columns.of(sequences, lambda: self._edit_columns(params)),
        )
        return self._sampler.editor.edit(logits, edits)

    def record_top_logprobs(
        self,
        sequences: list[TokenSequence],
        logits: torch.Tensor,
        batch: SamplingBatch,
        tokens: torch.Tensor,
    ) -> None:
        """Append the most likely allowed tokens to the sequences with ``top_logprobs``."""
        if not any(sequence.params.top_logprobs for sequence in sequences):
            return
        top, ids = self._sampler.top_logprobs(logits, batch, tokens)
        for sequence, values, token_ids in zip(sequences, top.tolist(), ids.tolist(), strict=True):
            if count := sequence.params.top_logprobs:
                # Tokens that the edits exclude have a log probability of -inf.
                pairs = zip(token_ids[:count], values[:count], strict=True)
                top_logprobs = tuple(
                    (token, value) for token, value in pairs if value > -float("inf")
                )
                sequence.top_logprobs.append(top_logprobs)

    def _matcher(self, params: SamplingParams, constraints: Constraints | None) -> Matcher:
        assert params.constraint is not None
        if constraints is None:
            raise RequestError(
                "A constraint needs a tokenizer, and this engine has none. "
                "Try: the engine of a LanguageModel"
            )
        return constraints.matcher(params.constraint, self._end_tokens(params))

    def _end_tokens(self, params: SamplingParams) -> frozenset[int]:
        """Return the end tokens of a request that are in the vocabulary."""
        model_tokens = frozenset() if params.ignore_eos else self._stop_token_ids
        stop_tokens = model_tokens.union(params.stop_token_ids)
        return frozenset(token for token in stop_tokens if token < self._vocab_size)

    def _bias_tensors(self, params: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self._padded_ids([[*p.logit_bias] for p in params])
        values = torch.zeros(tokens.shape, dtype=torch.float32)
        for row, p in enumerate(params):
            values[row, : len(p.logit_bias)] = torch.tensor([*p.logit_bias.values()])
        return tokens.to(self._device), values.to(self._device)

    def _min_length_tensors(
        self, params: list[SamplingParams]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end_tokens = [[*self._end_tokens(p)] if p.min_tokens else [] for p in params]
        min_tokens = torch.tensor([p.min_tokens for p in params], device=self._device)
        return min_tokens, self._padded_ids(end_tokens).to(self._device)

    def _edit_columns(
        self, params: list[SamplingParams]
    ) -> tuple[tuple[CustomOp[..., Tensor], Tensor], ...]:
        """Return op and values ``[B]`` of each per-row logit edit that any request uses."""
        pairs = []
        for name, op in _column_edits(params).items():
            values = [getattr(p, name) for p in params]
            dtype = torch.int64 if type(values[0]) is int else torch.float32
            pairs.append((op, torch.tensor(values, dtype=dtype, device=self._device)))
        return tuple(pairs)

    def _bitmask(
        self, sequences: list[TokenSequence], constraints: Constraints | None
    ) -> torch.Tensor | None:
        matchers = [sequence.matcher for sequence in sequences]
        if not any(matchers):
            return None
        # The device computes the logits meanwhile. The row of an unconstrained request allows all.
        mask = torch.full((len(matchers), -(-self._vocab_size // 32)), -1, dtype=torch.int32)
        rows = [(matcher, mask[row]) for row, matcher in enumerate(matchers) if matcher is not None]
        assert constraints is not None  # the matchers come from it
        constraints.fill(rows)
        return mask.to(self._device, non_blocking=True)

    @staticmethod
    def _padded_ids(lists: list[list[int]]) -> torch.Tensor:
        width = max(1, *map(len, lists))
        padded = [row + [_NO_TOKEN] * (width - len(row)) for row in lists]
        return torch.tensor(padded, dtype=torch.int64)
