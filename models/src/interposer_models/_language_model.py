"""The front door: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from interposer import Planned, Resolver, Verdict, explain
from interposer.errors import ConfigError, RequestError
from interposer_models._adapters.adapters import Adapters
from interposer_models._adapters.files import Adapter
from interposer_models._checkpoint.offer import Offer
from interposer_models._checkpoint.weights import Weights
from interposer_models._engine.constraints import Constraints
from interposer_models._engine.engine import Engine
from interposer_models._engine.non_finite import non_finite
from interposer_models._engine.sampling_params import SamplingParams
from interposer_models._engine.speculation import SpeculationFigures
from interposer_models._generation_config import GenerationSettings
from interposer_models._messages import Message
from interposer_models._requests import (
    Prompt,
    completions,
    continuations_of,
    requests,
    target_ids,
    token_ids_of,
)
from interposer_models._stream import Completion, Delta, Stream
from interposer_models._tokenizer import MissingTokenizer, TextTokenizer
from interposer_models._transfer.receiver import WeightsFrom, offer_of

_PREFIXES = "prefix cache: "


class LanguageModel:
    """A loaded model. ``interposer.explain`` says what it was built from.

    Any thread may call it; requests of several threads run as one batch. One iterator of ``stream``
    is for one thread.

    Where it has an encoder, a prompt is what that reads, and the decoder starts with the tokens
    that the checkpoint names.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        plan: Planned,
        weights: Weights | None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.engine = engine
        engine.constraints = Constraints(tokenizer, engine.model.config.vocab_size)
        self.weights = weights
        self.tokenizer = tokenizer
        self._resolver = plan.resolver
        self.placement = plan.placement
        self.path = plan.path
        stated: GenerationSettings | None = getattr(plan, "generation", None)
        self._generation = stated or GenerationSettings.of_folder(plan.path)
        self.quantization = getattr(plan, "quantization", None)  # to be planned elsewhere with
        self._graphs: Verdict | None = getattr(plan, "graphs", None)
        self.compiled: Verdict | None = getattr(plan, "compiled", None)
        self._adapters = Adapters(engine, plan, takes_none=weights is None)
        self._adapters.start(adapters or {})

    @property
    def resolver(self) -> Resolver:
        """The resolver that made the choices, with a note of what the prefix cache has saved."""
        if (counts := self.engine.prefixes) is not None:
            notes = self._resolver.notes
            kept = (note for note in notes if not note.startswith(_PREFIXES))
            notes[:] = [*kept, f"{_PREFIXES}{counts}"]
        return self._resolver

    def explanations(self) -> list[dict[str, Any]]:
        """Return ``interposer.explain(model).to_dict()`` of each process that computes it."""
        return [explain(self).to_dict()]

    @property
    def suggested(self) -> dict[str, Any]:
        """The settings that the checkpoint wants to be sampled with; none where it is greedy."""
        return self._generation.suggested

    @property
    def graphs(self) -> Verdict | None:
        """True if decode steps run as graphs; None if graphs were not requested."""
        running = self.engine.runner.graphs
        return self._graphs if running is None or running.compiled else running.compiled

    @property
    def speculation(self) -> SpeculationFigures | None:
        """The counts of guessed and accepted tokens so far; None where none are guessed."""
        running = self.engine.speculation
        return None if running is None else running.figures

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        **settings: Any,
    ) -> list[Completion]:
        """Return the completion of each prompt, in order; all run as one continuous batch.

        Args:
            prompts: a text, or a sequence of texts or of lists of token ids.
            params: for all prompts, or one for each.
            n: answers to each prompt. They follow each other, those to the first prompt first;
                answer i of a prompt has its seed plus i.
            **settings: fields of ``SamplingParams``, instead of ``params``.
        Raises:
            RequestError: a prompt or parameter is unusable; then none was run.
            ArithmeticError: the logits of an answer are not finite.
        """
        asked = requests(prompts, params, settings, n)
        streams: list[Stream] = []
        try:
            for prompt, own in asked:
                streams += self.start_several(prompt, own, n)
            while not all(stream.ended for stream in streams):
                with self.engine.lock:
                    # A step of another thread may have computed tokens of these answers too.
                    if not any(stream.num_unread for stream in streams if not stream.ended):
                        self.engine.step()
                    for stream in streams:
                        self._read(stream)
        finally:
            self._cancel(streams)
        return completions(streams, n)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, n: int = 1, **settings: Any
    ) -> Iterator[Delta]:
        """Yield the completion of ``prompt`` token by token; closing the iterator cancels it.

        Args:
            n: answers, as ``generate`` has them; ``Delta.index`` tells them apart.
        Raises: RequestError: at the call, before the first token.
        """
        ((_, own),) = requests([prompt], params, settings, n)
        deltas = self._deltas(self.start_several(prompt, own, n, shares=False))
        next(deltas)  # a generator that never ran would not cancel when it is closed
        return cast(Iterator[Delta], deltas)

    def chat(
        self,
        messages: Iterable[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Completion:
        """Return the next message of the assistant.

        Args:
            messages: with ``role`` and ``content``, the first one first.
            params: as ``generate`` takes them, or single ``settings``.
            tools: JSON schemas of functions, or documented and typed functions, for templates that
                offer them to the model.
            template: in place of the checkpoint's chat template.
            options: further variables of the template, such as ``{"enable_thinking": False}``.
        Raises: RequestError: a message or parameter is unusable, or there is no template.
        """
        prompt = self.chat_prompt(messages, tools=tools, template=template, options=options)
        ((_, own),) = requests([prompt], params, settings, 1)  # settings cannot hold n
        return self.generate([prompt], own)[0]

    def chat_prompt(
        self,
        messages: Iterable[Message],
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids by which ``chat`` asks for the next message, for ``stream`` too.

        Raises: RequestError: a message is unusable, or there is no template.
        """
        with self.engine.lock:  # some tokenizers are for one thread at a time
            return self.tokenizer.chat.token_ids(messages, tools, template, options or {})

    def logits(
        self,
        token_ids: Sequence[int],
        *,
        adapter: str | None = None,
        num_prompt: int | None = None,
        source: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the logits after every token, ``[T, V]`` float32.

        Args:
            token_ids: of the decoder, where there is an encoder.
            num_prompt: how many tokens are the prompt, which see each other in both directions in a
                prefix-LM; None takes all. Other models have no use for it.
            source: token ids for the encoder, where there is one.
        """
        with self.engine.lock:
            return self.engine.logits(token_ids, adapter, num_prompt, source)

    def score(
        self, prompt: Prompt, continuations: Sequence[Prompt], *, adapter: str | None = None
    ) -> list[tuple[float, ...]]:
        """Return the natural-log probability of each token of each continuation of a prompt.

        A text is split into tokens together with the prompt; as many of these as the prompt has
        alone count as its own. The sum of a tuple scores a continuation. An encoder reads the
        prompt alone; a continuation is then a text of its own, special tokens included.

        Raises: RequestError: the prompt is empty, or a continuation adds no token to it; or, with
            it, exceeds the context; or an argument is of another type.
        """
        listed = continuations_of(prompt, continuations)
        with self.engine.lock:
            return self._scores(prompt, listed, adapter)

    def _scores(
        self, prompt: Prompt, continuations: Sequence[Prompt], adapter: str | None
    ) -> list[tuple[float, ...]]:
        front = self.tokenizer.encode(prompt) if isinstance(prompt, str) and prompt else prompt
        source: Sequence[int] | None = None
        if self.engine.runner.sources is not None:
            front, source = self.engine.start_token_ids, cast("Sequence[int]", front)
        scores = []
        for continuation in continuations:
            if isinstance(continuation, str) != isinstance(prompt, str):
                raise RequestError(
                    f"{continuation!r:.100} continues {prompt!r:.100}, but only one is a text. "
                    "Try: both as texts, or both as lists of token ids"
                )
            if source is not None:
                tokens = target_ids(continuation, self.tokenizer, self.engine.start_token_ids)
            elif isinstance(prompt, str):
                tokens = [*self.tokenizer.encode(prompt + cast(str, continuation))]
            else:
                tokens = [*prompt, *cast("Sequence[int]", continuation)]
            if not len(front) or len(tokens) <= len(front):
                raise RequestError(
                    f"{continuation!r:.100} adds no token to the prompt {prompt!r:.100}. "
                    "Try: a prompt and a continuation of at least one token each"
                )
            front_size = len(front)
            logits = self.logits(tokens, adapter=adapter, num_prompt=front_size, source=source)
            after = logits[front_size - 1 : -1].log_softmax(-1)
            chosen = torch.tensor([*map(int, tokens[len(front) :])], device=after.device)
            chances = after.gather(1, chosen[:, None])[:, 0]
            if chances.isnan().any():
                raise non_finite(f"The logits of the continuation {continuation!r:.100}")
            scores.append(tuple(chances.tolist()))
        return scores

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that are loaded."""
        return self._adapters.names

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> None:
        """Load a LoRA adapter, which requests name by ``SamplingParams(adapter=name)``.

        It joins between two steps; requests that were started keep what they have.

        Args:
            path: a folder that PEFT saved, or ``"namespace/name"`` on the hub.
            replace: it may take the place of an adapter of this name. Requests that have that one
                keep it, and its memory is freed when the last of them has ended.
        Raises:
            CheckpointError: it is incomplete, of another model, or asks for what is not computed.
            ConfigError: the name is taken and ``replace`` is not said, or the model is compiled or
                an adapted one, or what computes adapters cannot be captured.
        """
        with self.engine.lock:
            self._adapters.load(name, path, replace)

    def remove_adapter(self, name: str) -> None:
        """Remove an adapter and free its memory.

        Raises:
            UnknownNameError: no adapter has the name.
            RequestError: unfinished requests use it.
        """
        with self.engine.lock:
            self._adapters.remove(name)

    def update_weights(
        self, tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | WeightsFrom
    ) -> tuple[str, ...]:
        """Exchange weights for new ones, of all layers or of some; all that are given or none.

        The layers that a tensor belongs to get all of their tensors in one call: the scales and
        zero points of quantized ones, and those of all layers that run as one product. They are
        prepared as when they were loaded, and held beside the present ones until the call ends.

        Args:
            tensors: by the names, and in the formats, of the checkpoint; on any device. Or where
                they come from: another process, which calls ``send_weights``.
        Returns: prefixes of layers whose operands could not be written in place, because what is
            held now has another form. Graphs that were captured with them are captured again.
        Raises:
            ConfigError: the model is an adapted one, or the group is not usable.
            RankError: the trainer, or another receiver, failed, died or did not answer. Nothing was
                changed, unless a note of the error says so.
            RequestError: a request is unfinished, and its cache was computed with other weights.
            CheckpointError: a tensor is unknown, given twice, of the wrong shape or kind of dtype,
                unusable, or not given though others of its layer are. Nothing was changed.
        """
        with self.engine.lock, offer_of(tensors) as offer:
            return self._take(offer)

    def _take(self, offer: Offer) -> tuple[str, ...]:
        """Replace weights by those of an open offer."""
        if self.weights is None:
            raise ConfigError(
                "The weights of an adapted model are changed in the model itself. "
                "Try: adapted.restore(), change them, and adapt() again"
            )
        if self.engine.busy:
            raise RequestError(
                "Weights cannot be exchanged while requests are unfinished: their cached keys and "
                "values belong to the present ones. Try: finish or cancel them first"
            )
        with self.engine.runner.numerics():
            moved = self.weights.update(offer, f"update of {self.path}")
        self.engine.forget_prefixes()
        self._adapters.renew()
        if moved:
            self.engine.runner.renew()
        return moved

    def start(self, prompt: Prompt, params: SamplingParams) -> Stream:
        """Queue a request for an engine that the caller steps, and return what reads its tokens.

        Raises: RequestError: the prompt or a parameter is unusable.
        """
        return self.start_several(prompt, params, 1)[0]

    def start_several(
        self,
        prompt: Prompt,
        params: SamplingParams,
        n: int,
        first_index: int = 0,
        *,
        shares: bool = True,
    ) -> list[Stream]:
        """Do what ``start`` does for each of ``n`` answers to a prompt; see ``generate``.

        Args:
            first_index: of the answers; see ``Delta.index``.
            shares: the first answer alone has the log probabilities of the prompt, if they are
                asked for.
        Raises: RequestError, CheckpointError: as ``start``; then none is queued.
        """
        self._check_stop(params)
        streams: list[Stream] = []
        with self.engine.lock:
            self.tokenizer.read()  # which may fail, before anything is queued
            front, source = self._given(token_ids_of(prompt, self.tokenizer))
            try:
                for index, own in enumerate(params.numbered(n, shares), first_index):
                    added = self.engine.add(front, own, source, reads_texts=True)
                    streams.append(Stream(added, self.tokenizer, index))
            except Exception:
                for stream in streams:
                    self.engine.cancel(stream.sequence)
                raise
        return streams

    def check(self, token_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """Return the ids of a prompt as ``start`` takes it; any thread may ask.

        Raises: RequestError: the prompt or a parameter is unusable.
        """
        self._check_stop(params)
        self.tokenizer.read()  # which may fail, before anything is queued
        front, source = self._given(token_ids)
        tokens = self.engine.check(front, params, source)
        return tokens if source is None else self.engine.checked_source(source)

    def room(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens may follow a prompt; none or fewer where it is too long."""
        return self.engine.runner.longest - len(self._given(token_ids)[0])

    def _check_stop(self, params: SamplingParams) -> None:
        if params.stop and isinstance(self.tokenizer, MissingTokenizer):
            raise RequestError(
                f"stop is {params.stop!r}, but {self.path} holds no tokenizer to find texts with. "
                "Try: stop_token_ids, or add a tokenizer.json"
            )

    def _given(self, prompt: Sequence[int]) -> tuple[Sequence[int], Sequence[int] | None]:
        """Return the tokens of the decoder, and those of the encoder if there is one."""
        if self.engine.runner.sources is None:
            return prompt, None
        return self.engine.start_token_ids, prompt

    def _deltas(self, streams: Sequence[Stream]) -> Iterator[Delta | None]:
        """Yield None once, then the deltas."""
        try:
            yield None
            while not all(stream.ended for stream in streams):
                deltas: list[Delta] = []
                with self.engine.lock:  # not while the caller has a delta
                    if not any(stream.num_unread for stream in streams if not stream.ended):
                        self.engine.step()
                    for stream in streams:
                        deltas += self._read(stream)
                yield from deltas
        finally:
            self._cancel(streams)

    def _cancel(self, streams: Sequence[Stream]) -> None:
        """Cancel the unfinished ones of these answers after the current step."""

        def cancel() -> None:
            for stream in streams:
                self.engine.cancel(stream.sequence)

        if any(stream.sequence.finish_reason is None for stream in streams):
            self.engine.lock.call_soon(cancel)

    def _read(self, stream: Stream) -> list[Delta]:
        deltas = []
        while stream.num_unread and not stream.ended:
            deltas.append(stream.read())
        if stream.sequence.error is not None and not deltas:
            raise stream.sequence.error
        if stream.ended:
            self.engine.cancel(stream.sequence)
        return deltas
