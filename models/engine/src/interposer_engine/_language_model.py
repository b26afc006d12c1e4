"""The language model: generates texts from prompts, by the engine."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import torch

from interposer import Planned, Resolver, Verdict, explain
from interposer.errors import ConfigError, RequestError
from interposer_engine import _sequence as sequences
from interposer_engine._answers.parts import ParsedAnswer
from interposer_engine._chat import Message
from interposer_engine._checkpoint.updates import Offer
from interposer_engine._checkpoint.weights import Weights
from interposer_engine._closed_model import ClosedModel, closed_error
from interposer_engine._constrained_decoding.constraints import Constraints
from interposer_engine._content_parts import with_media
from interposer_engine._embedded_input import EmbeddedInput, PromptTokens, num_tokens
from interposer_engine._encoder_features import EncoderFeatures
from interposer_engine._encoder_inputs import Source
from interposer_engine._engine import Engine
from interposer_engine._generation_config import GenerationSettings
from interposer_engine._input_encoder import InputEncoder
from interposer_engine._lora.adapters import Adapters
from interposer_engine._lora.files import Adapter
from interposer_engine._media import Media
from interposer_engine._sampling import chosen_params, is_listing, non_finite
from interposer_engine._sampling_params import SamplingParams
from interposer_engine._speculation.api import SpeculationCounts
from interposer_engine._speech.audio import NO_LIMITS, Audio, AudioLimits, read_audio
from interposer_engine._speech.settings import SpeechSettings
from interposer_engine._speech.transcriber import Transcriber, TranscriptionOptions
from interposer_engine._speech.transcript import Transcript, TranscriptStream
from interposer_engine._tokenizer import Detokenizer, MissingTokenizer, TextTokenizer
from interposer_engine._weight_transfer.receiver import Tensors, WeightsFrom, offer_of

TextPrompt = str | PromptTokens
"""A prompt as a text, or as token ids and encoded runs."""
TokenPrompt = PromptTokens | EncoderFeatures
"""A prompt without texts: token ids and encoded runs, or features for an encoder."""
Prompt = str | TokenPrompt
_PROMPTS = "a text or a list of texts or of lists of token ids"


@dataclass(frozen=True, slots=True)
class Completion:
    """The generated answer of one request: text, tokens, log probabilities, finish reason.

    Attributes:
        text: Text of the new tokens without an end token; empty if the model has no tokenizer.
        token_ids: New tokens, including an end token.
        logprobs: Natural-log probability of each new token, after penalties, biases and
            constraints, before temperature and truncation.
        finish_reason: ``"stop"`` for an end token, a stop text or a complete constraint;
            ``"length"`` for a limit; ``"constraint"`` if no token could follow although the text is
            incomplete.
        top_logprobs: Ids and log probabilities of the likeliest tokens at each position, if
            requested; fewer if a constraint allows fewer.
        prompt_token_ids: The prompt, without the tokens of images and sounds.
        prompt_logprobs: Log probabilities of the prompt tokens from the second on, if requested.
        no_speech_probability: Probability that the sound of the request holds no speech, if its
            parameters have rules for a transcript.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: sequences.FinishReason
    top_logprobs: tuple[sequences.TopLogprobs, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[sequences.PromptLogprob, ...] = ()
    no_speech_probability: float | None = None


@dataclass(frozen=True, slots=True)
class Delta:
    """The next token of a stream, with the text that it completes, which may be empty.

    Attributes:
        index: Index of the answer, if the request has several.
        prompt_logprobs: As in ``Completion``, with the first token of an answer.
        offset: Number of characters of the answer before ``text``.
    """

    text: str
    token_id: int
    logprob: float
    finish_reason: sequences.FinishReason | None
    top_logprobs: sequences.TopLogprobs = ()
    index: int = 0
    prompt_logprobs: tuple[sequences.PromptLogprob, ...] = ()
    offset: int = 0


class Stream:
    """Token reader of a sequence, which also decodes the text and cuts it at the first stop text.

    A stream gets the events of its sequence from every step, whichever thread steps. If you created
    the stream with ``LanguageModel.start``, call ``lm.engine.step()`` to compute tokens, and
    ``lm.engine.cancel(stream.sequence)`` at the end.

    Attributes:
        sequence: The request in the engine.
        index: Index of the answer, if the request has several.
        text: Text of the tokens that were read so far.
        stopped: Whether a stop text was found.
    """

    def __init__(
        self, sequence: sequences.TokenSequence, tokenizer: TextTokenizer, index: int = 0
    ) -> None:
        self.sequence = sequence
        self.index = index
        self.text = ""
        self.stopped = False
        self._unread = sequence.unread = deque[sequences.Event]()
        self._num_read = 0
        self._sent = 0
        self._detokenizer = Detokenizer(tokenizer)

    @property
    def ended(self) -> bool:
        """Whether the last token of the sequence has been read."""
        return self._finish_reason() is not None

    @property
    def num_unread(self) -> int:
        """Number of computed tokens that have not been read yet."""
        return len(self._unread)

    def read(self) -> Delta:
        """Take the next unread token, and return the token with the text that it adds."""
        return self.delta(self.take())

    def take(self) -> sequences.Event:
        """Take the next unread token without decoding its text, for ``delta``."""
        return self._unread.popleft()

    def delta(self, event: sequences.Event) -> Delta:
        """Return an event's token with the text that it adds.

        If the request has no stop texts, this may run in another thread than the engine.
        """
        _, token_id, logprob, top_logprobs, reason = event
        self._num_read += 1
        if reason is not None and self.sequence.has_end_token:
            self.text += self._detokenizer.rest()
        else:
            self.text += self._detokenizer.push(token_id, last=reason is not None)
        stops = self.sequence.params.stop
        if stop_positions := [
            position for stop in stops if (position := self.text.find(stop)) >= 0
        ]:
            self.text = self.text[: min(stop_positions)]
            self.stopped, reason = True, "stop"
        # Hold back text that may become part of a stop text.
        end = len(self.text) if reason is not None else self._safe_end()
        start, self._sent = self._sent, max(self._sent, end)
        prompt_logprobs = () if self._num_read > 1 else self._prompt_logprobs
        return Delta(
            self.text[start:end],
            token_id,
            logprob,
            reason,
            top_logprobs,
            self.index,
            prompt_logprobs,
            start,
        )

    def completion(self) -> Completion:
        """Return the completion of an ended request.

        Raises: Exception: the error that ended the request.
        """
        if self.sequence.error is not None:
            raise self.sequence.error
        reason = self._finish_reason()
        assert reason is not None
        sequence = self.sequence
        # A step may have computed tokens after a stop text.
        read_tokens = slice(self._num_read)
        return Completion(
            self.text,
            tuple(sequence.output[read_tokens]),
            tuple(sequence.logprobs[read_tokens]),
            reason,
            tuple(sequence.top_logprobs[read_tokens]),
            tuple(sequence.request_ids),
            self._prompt_logprobs,
            sequence.no_speech_probability,
        )

    @property
    def _prompt_logprobs(self) -> tuple[sequences.PromptLogprob, ...]:
        return tuple(self.sequence.prompt_logprobs)

    def _finish_reason(self) -> sequences.FinishReason | None:
        if self.stopped:
            return "stop"
        return None if self.num_unread else self.sequence.finish_reason

    def _safe_end(self) -> int:
        """Return the length of the text that can no longer be the start of a stop text."""
        stops = self.sequence.params.stop
        longest = max(map(len, stops), default=1) - 1
        # Hold back the longest end of the text that a stop text starts with.
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in stops):
                return len(self.text) - length
        return len(self.text)


class LanguageModel:
    """A loaded language model, whose kernels ``interposer.explain`` reports.

    Any thread may call the methods; requests of several threads run as one batch. An iterator of
    ``stream`` must be used in one thread.

    ``with load(...) as lm:`` closes the model at the end of the block.

    If the model has an encoder, a prompt is the encoder input, and the decoder starts with the
    tokens that the checkpoint names.

    Attributes:
        input_encoder: Encodes images and sounds of prompts; None if the checkpoint has no such
            encoder, or was loaded without it.
    """

    input_encoder: InputEncoder | None = None

    def __init__(
        self,
        engine: Engine,
        tokenizer: TextTokenizer,
        plan: Planned,
        weights: Weights | None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> None:
        self.engine = engine
        # Constraints need the tokenizer, so the engine gets its compiler here.
        engine.constraints = Constraints(tokenizer, engine.model.config.vocab_size)
        self.weights = weights
        self.tokenizer = tokenizer
        self._resolver = plan.resolver
        self.placement = plan.placement
        self.path = plan.path
        generation_settings: GenerationSettings | None = getattr(plan, "generation", None)
        self._generation = generation_settings or GenerationSettings.of_folder(plan.path)
        # A plan of another library has only the fields of ``Planned``, so the others have defaults.
        self.quantization = getattr(plan, "quantization", None)  # other ranks plan with it
        self._dtype: torch.dtype | None = getattr(plan, "dtype", None)
        self._graphs: Verdict | None = getattr(plan, "graphs", None)
        self.compiled: Verdict | None = getattr(plan, "compiled", None)
        self._adapters = Adapters(engine, plan, takes_none=weights is None)
        self._adapters.start(adapters or {})
        self._is_closed = False

    def __enter__(self) -> Self:
        """Return the model.

        Raises: RequestError: the model was closed.
        """
        if self._is_closed:
            raise closed_error(self.path)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()

    def close(self) -> None:
        """Free the model's weights, caches, threads and child processes after the current step.

        Unfinished requests and later calls raise RequestError. Closing again does nothing.
        """
        engine = self.engine
        if self._is_closed:
            return
        with engine.lock:
            if not self._is_closed:
                self._is_closed = True
                self._release()
        del engine
        gc.collect()  # layers and kernels refer to each other

    def _release(self) -> None:
        """End the child processes, and drop the references to weights and caches."""
        if self.engine.constraints is not None:
            self.engine.constraints.limit(None)
        closed = ClosedModel.of(self.path)
        self.engine, self.weights, self._adapters = closed, closed, closed
        self.input_encoder = closed

    def __repr__(self) -> str:
        """Describe architecture, size, dtype, device and context of the model."""
        return f"<{type(self).__name__} {self.path}: {', '.join(self._facts())}>"

    def _facts(self) -> Iterator[str]:
        kinds = {choice.request.kind: choice for choice, _ in self._resolver.choices.values()}
        if "model" in kinds:
            yield kinds["model"].request.name
        if not self._is_closed and isinstance(self.engine.model, torch.nn.Module):
            yield f"{num_weights(self.engine.model) / 1e6:.1f} million weights"
        device = self.placement.device
        dtype = "" if self._dtype is None else f"{self._dtype} on ".removeprefix("torch.")
        yield f"{dtype}{device.torch_device} ({self.placement.platform.name}: {device.name})"
        if self._is_closed:
            yield "closed"
        else:
            yield f"context of {self.engine.model.config.max_position_embeddings} tokens"

    @property
    def resolver(self) -> Resolver:
        """The resolver that chose the model's kernels."""
        return self._resolver

    @property
    def current_notes(self) -> list[str]:
        """Notes for ``explain`` that change while the model runs."""
        statistics = self.engine.prefixes
        return [] if statistics is None else [f"prefix cache: {statistics}"]

    def explanations(self) -> list[dict[str, Any]]:
        """Return ``interposer.explain(model).to_dict()`` of each process of the model."""
        return [explain(self).to_dict()]

    @property
    def suggested(self) -> dict[str, Any]:
        """Sampling settings that the checkpoint suggests; empty if that is greedy decoding."""
        return self._generation.suggested

    @property
    def graphs(self) -> Verdict | None:
        """Whether decode steps run as captured graphs; None if graphs were not requested."""
        running = self.engine.runner.graphs
        return self._graphs if running is None or running.compiled else running.compiled

    @property
    def speculation(self) -> SpeculationCounts | None:
        """Numbers of draft tokens and of accepted ones; None without speculative decoding."""
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
        """Return the completion of each prompt, in order; all prompts run as one continuous batch.

        Args:
            prompts: A text, or a sequence of texts or of lists of token ids. A list may also hold
                an ``EmbeddedInput`` for a run of tokens, such as those of an image.
            params: Sampling parameters for all prompts, or one per prompt.
            n: Number of answers to each prompt. The result has all answers to the first prompt
                first. Answer i of a prompt uses the seed plus i.
            **settings: Fields of ``SamplingParams``, instead of ``params``.
        Raises:
            RequestError: a prompt or parameter is unusable; then no prompt was run.
            ArithmeticError: the logits of an answer are not finite.
        """
        checked_requests = requests(prompts, params, settings, n)
        streams: list[Stream] = []
        try:
            for prompt, prompt_params in checked_requests:
                streams += self.start_several(prompt, prompt_params, n)
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
            n: Number of answers, as in ``generate``; ``Delta.index`` tells the answers apart.
        Raises: RequestError: at the call, before the first token.
        """
        ((_, merged),) = requests([prompt], params, settings, n)
        deltas = self._deltas(self.start_several(prompt, merged, n, shares=False))
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
            messages: Messages with ``role`` and ``content``, the first one first. A content is a
                text, or a list of parts: ``{"type": "text", "text": ...}``, ``{"type": "image",
                "image": ...}`` with a path, bytes or a ``PIL.Image.Image``, ``{"type": "audio",
                "audio": ...}``, ``Media``, or OpenAI's ``image_url`` and ``input_audio`` with the
                content in base64.
            params: Sampling parameters, instead of single ``settings``.
            tools: JSON schemas of functions, or documented and typed functions, for templates that
                offer tools to the model.
            template: Chat template to use instead of the checkpoint's.
            options: Further variables of the template, such as ``{"enable_thinking": False}``.
        Raises: RequestError: a message or parameter is unusable, or there is no template.
        """
        # Before the media are encoded: the salt separates their vectors, too.
        (merged,) = chosen_params(params, settings, 1)  # settings cannot hold n
        prompt = self.chat_prompt(
            messages,
            tools=tools,
            template=template,
            options=options,
            cache_salt=merged.cache_salt,
        )
        return self.generate([prompt], merged)[0]

    def transcribe(
        self,
        audio: Audio,
        *,
        sampling_rate: int | None = None,
        limits: AudioLimits = NO_LIMITS,
        **settings: Any,
    ) -> Transcript:
        """Return the text of speech, with segments and times; the model must read sounds.

        Args:
            audio: Path or content of a file, or floating-point samples ``[S]`` or ``[C, S]``.
            sampling_rate: Samples per second of ``audio``, if it holds samples.
            limits: Largest sound that is read.
            **settings: Fields of ``TranscriptionOptions``, such as ``language="en"``,
                ``task="translate"`` or ``timestamps=False``.
        Raises: RequestError: the sound cannot be read, the model reads no sounds, or a setting is
            unusable.
        """
        stream = self.transcribe_stream(
            audio, sampling_rate=sampling_rate, limits=limits, **settings
        )
        for _ in stream:
            pass
        return stream.transcript

    def transcribe_stream(
        self,
        audio: Audio,
        *,
        sampling_rate: int | None = None,
        limits: AudioLimits = NO_LIMITS,
        **settings: Any,
    ) -> TranscriptStream:
        """Return an iterator over the segments of each window of 30 seconds; see ``transcribe``.

        A window is decoded when the iterator reaches it.

        Raises: RequestError: at the call, before the first window; see ``transcribe``.
        """
        options, transcriber = TranscriptionOptions.of(settings), self._transcriber
        target_rate = transcriber.settings.log_mel.sampling_rate
        return transcriber.stream(read_audio(audio, sampling_rate, target_rate, limits), options)

    @cached_property
    def _transcriber(self) -> Transcriber:
        model = self.engine.model
        shape = getattr(model, "feature_shape", None)
        if shape is None:
            raise RequestError(f"{self.path} reads text, no sounds. Try: a checkpoint of Whisper")
        vocabulary, size = self.tokenizer.vocabulary, model.config.vocab_size
        settings = SpeechSettings.read(self.path, self._generation.stated, vocabulary, shape, size)
        return Transcriber(self, settings)

    def read_answer(
        self,
        completion: Completion,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
    ) -> ParsedAnswer:
        """Split a completion of ``chat`` into text, reasoning and tool calls.

        The format follows from the chat template of the checkpoint; without a known format,
        everything is text.

        Args:
            tools: Tools that ``chat`` had. Without tools, calls stay text.
        """
        with self.engine.lock:  # some tokenizers are not thread-safe
            reader = self.tokenizer.chat.reader(completion.prompt_token_ids, tools)
            detokenizer = Detokenizer(self.tokenizer)
            num_left = len(completion.text)  # which ends before a stop text
            last = len(completion.token_ids) - 1
            for index, token_id in enumerate(completion.token_ids):
                text = detokenizer.push(token_id, last=index == last)[:num_left]
                num_left -= len(text)
                reader.push(token_id, text, is_last=index == last)
            return reader.answer

    def chat_prompt(
        self,
        messages: Iterable[Message],
        *,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        template: str | None = None,
        options: Mapping[str, Any] | None = None,
        cache_salt: str = "",
    ) -> list[int | EmbeddedInput]:
        """Return the prompt that ``chat`` uses, for example for ``stream``.

        Args:
            cache_salt: See ``media_prompt``.
        Returns: token ids, and the encoded pictures and sounds of the messages.
        Raises: RequestError: a message is unusable, or there is no template.
        """
        read_messages = self.read_messages(messages)
        with self.engine.lock:  # some tokenizers are not thread-safe
            chat = self.tokenizer.chat.render(
                read_messages, tools, template, options or {}, self.media_kinds
            )
        return self.media_prompt(chat.token_ids, chat.media, cache_salt=cache_salt)

    @property
    def media_kinds(self) -> frozenset[str]:
        """Kinds of media that prompts may have: ``"image"``, ``"audio"``, both or none."""
        return frozenset() if self.input_encoder is None else self.input_encoder.kinds

    @property
    def media_advice(self) -> str:
        """What to do to give the model media; "" unless the format of its file is the reason."""
        if self.input_encoder is not None or self.path.suffix.lower() != ".gguf":
            return ""
        return (
            f"{self.path.name} holds the text half of a model: image and audio encoders in GGUF "
            "files (mmproj) are not read. Try: load the folder of the model's safetensors files"
        )

    def read_messages(self, messages: Iterable[Message]) -> Iterable[Message]:
        """Return messages with ``Media`` in place of the parts that describe media.

        Raises: RequestError: a part is malformed, or of a kind that the model does not take.
        """
        if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
            return messages  # refused by the chat renderer
        return with_media(messages, self.media_kinds, self.media_advice)

    def media_prompt(
        self, prompt: str | Sequence[int], media: Sequence[Media], *, cache_salt: str = ""
    ) -> list[int | EmbeddedInput]:
        """Return a prompt with pictures or sounds, for ``generate`` or ``stream``.

        Other threads can run steps of the model meanwhile.

        Args:
            prompt: A text or token ids, with one placeholder token of the model for each medium,
                such as ``<image>``.
            media: Pictures and sounds in the order of their placeholders.
            cache_salt: Only prompts with the same salt share cached vectors of media. Give the
                salt of ``SamplingParams``.
        Raises: RequestError: a medium cannot be decoded or is too large, the number of placeholders
            differs, or the model takes no media.
        """
        if isinstance(prompt, str):
            with self.engine.lock:
                token_ids: Sequence[int] = self.tokenizer.encode(prompt)
        else:
            token_ids = prompt
        if not media:
            return [*token_ids]
        if self.input_encoder is None:
            raise RequestError(
                f"The prompt has media of the kind {media[0].kind!r}, but {self.path} has no "
                "encoder for them, or was loaded without it. Try: a prompt without media"
            )
        return self.input_encoder.embed(token_ids, media, cache_salt=cache_salt)

    def logits(
        self,
        token_ids: PromptTokens,
        *,
        adapter: str | None = None,
        num_prompt: int | None = None,
        source: Source | None = None,
    ) -> torch.Tensor:
        """Compute the logits after every token, ``[T, V]`` float32.

        Args:
            token_ids: Tokens of the prompt and output; the decoder's, if the model has an encoder.
                An ``EmbeddedInput`` stands for as many tokens as it has.
            adapter: Name of a loaded adapter; None for the plain model.
            num_prompt: Number of prompt tokens, which attend in both directions in a prefix-LM;
                None for all. Other models ignore this number.
            source: Token ids or features of the encoder input, if the model has an encoder.
        """
        with self.engine.lock:
            return self.engine.logits(token_ids, adapter, num_prompt, source)

    def score(
        self,
        prompt: TextPrompt,
        continuations: Sequence[TextPrompt],
        *,
        adapter: str | None = None,
    ) -> list[tuple[float, ...]]:
        """Return the natural-log probability of each token of each continuation of a prompt.

        A text is tokenized together with the prompt; the first tokens count as the prompt, as many
        as the prompt alone has. The sum of a tuple scores a continuation. In a model with an
        encoder, the encoder reads only the prompt; a continuation is then tokenized by itself,
        special tokens included.

        Raises: RequestError: the prompt is empty, a continuation adds no token, prompt and
            continuation exceed the context, or an argument has another type.
        """
        continuation_list = continuations_of(prompt, continuations)
        with self.engine.lock:
            return self._scores(prompt, continuation_list, adapter)

    def _scores(
        self, prompt: TextPrompt, continuations: Sequence[TextPrompt], adapter: str | None
    ) -> list[tuple[float, ...]]:
        prefix_ids, source = self._split_prompt(token_ids_of(prompt, self.tokenizer))
        prefix_length = num_tokens(prefix_ids)
        scores = []
        for continuation in continuations:
            if isinstance(continuation, str) != isinstance(prompt, str):
                raise RequestError(
                    f"{continuation!r:.100} continues {prompt!r:.100}, but only one is a text. "
                    "Try: both as texts, or both as lists of token ids"
                )
            tokens: list[int | EmbeddedInput]
            if source is not None:
                tokens = [*target_ids(continuation, self.tokenizer, self.engine.start_token_ids)]
            elif isinstance(prompt, str):
                tokens = [*self.tokenizer.encode(prompt + cast(str, continuation))]
            else:
                tokens = [*prompt, *cast("Sequence[int]", continuation)]
            # A continuation can merge into the last prompt token, so that no token is added.
            if not prefix_length or num_tokens(tokens) <= prefix_length:
                raise RequestError(
                    f"{continuation!r:.100} adds no token to the prompt {prompt!r:.100}. "
                    "Try: a prompt and a continuation of at least one token each"
                )
            logits = self.logits(tokens, adapter=adapter, num_prompt=prefix_length, source=source)
            # Row i predicts token i + 1, so the rows start at the last prompt token.
            logprobs = logits[prefix_length - 1 : -1].log_softmax(-1)
            new_tokens = cast("Sequence[int]", tokens[len(prefix_ids) :])
            chosen = torch.tensor([*map(int, new_tokens)], device=logprobs.device)
            token_logprobs = logprobs.gather(1, chosen[:, None])[:, 0]
            if token_logprobs.isnan().any():
                raise non_finite(f"The logits of the continuation {continuation!r:.100}")
            scores.append(tuple(token_logprobs.tolist()))
        return scores

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded LoRA adapters."""
        return self._adapters.names

    def load_adapter(self, name: str, path: str | Path, *, replace: bool = False) -> None:
        """Load a LoRA adapter, which requests select with ``SamplingParams(adapter=name)``.

        The adapter is added between two steps; running requests are not affected.

        Args:
            path: A folder that PEFT saved, or ``"namespace/name"`` on the hub.
            replace: Whether to replace a loaded adapter of this name. Running requests keep the
                replaced adapter, which is freed after the last of the requests.
        Raises:
            CheckpointError: the adapter is incomplete, belongs to another model, or needs an
                unsupported feature.
            ConfigError: the name is in use and ``replace`` is false; or the model is compiled or
                adapted; or the kernels of adapters cannot be captured in graphs.
        """
        with self.engine.lock:
            self._adapters.load(name, path, replace)

    def remove_adapter(self, name: str) -> None:
        """Remove a LoRA adapter and free its memory.

        Raises:
            UnknownNameError: no adapter has the name.
            RequestError: unfinished requests use the adapter.
        """
        with self.engine.lock:
            self._adapters.remove(name)

    def update_weights(self, tensors: Tensors | WeightsFrom) -> tuple[str, ...]:
        """Replace the weights of some or all layers: all given tensors, or none of them.

        All tensors of a layer must be in one call: also the scales and zero points of quantized
        layers, and the tensors of all layers that are merged into one matmul. Tensors are prepared
        as at loading, and exist next to the present ones until the call ends.

        Args:
            tensors: Tensors by the names and in the formats of the checkpoint, on any device. Or
                the source of the tensors: a safetensors file, a folder of such files, or another
                process, which calls ``send_weights``.
        Returns: prefixes of the layers that got new memory, because the new operands have another
            form. Graphs are captured again for the new memory.
        Raises:
            ConfigError: the model is adapted, or the process group is unusable.
            RankError: the trainer or another receiver failed, died or did not answer. Nothing was
                changed, unless a note of the error says so.
            RequestError: a request is unfinished, with cached values of the present weights.
            CheckpointError: a tensor is unknown, duplicate, unusable, has the wrong shape or kind
                of dtype, or is missing although others of its layer are present. Nothing was
                changed.
        """
        with self.engine.lock, offer_of(tensors) as offer:
            return self._apply_offer(offer)

    def _apply_offer(self, offer: Offer) -> tuple[str, ...]:
        """Replace weights by the tensors of an opened ``Offer``."""
        if self.weights is None:
            raise ConfigError(
                "The weights of an adapted model are changed in the model itself. "
                "Try: adapted.restore(), change them, and adapt() again"
            )
        if self.engine.busy:
            raise RequestError(
                "Weights cannot be updated while requests are unfinished: their cached keys and "
                "values belong to the present ones. Try: finish or cancel them first"
            )
        with self.engine.runner.numerics():
            moved = self.weights.update(offer, f"update of {self.path}")
        # Cached prefixes were computed with the former weights.
        self.engine.forget_prefixes()
        self._adapters.reread_base_weights()
        if moved:
            # Captured graphs and compiled code read the former memory.
            self.engine.runner.refresh_operands()
        return moved

    def start(self, prompt: Prompt, params: SamplingParams) -> Stream:
        """Queue a request for an engine that the caller steps, and return its token reader.

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
        """Queue ``n`` answers to one prompt, and return a token reader for each; see ``generate``.

        Args:
            first_index: Index of the first answer; see ``Delta.index``.
            shares: Whether only the first answer computes the log probabilities of the prompt, if
                requested.
        Raises: RequestError, CheckpointError: as ``start``; then no answer is queued.
        """
        self._check_stop(params)
        streams: list[Stream] = []
        with self.engine.lock:
            self.tokenizer.read()  # may fail: read before anything is queued
            decoder_ids, source = self._split_prompt(token_ids_of(prompt, self.tokenizer))
            try:
                for index, answer_params in enumerate(params.numbered(n, shares), first_index):
                    sequence = self.engine.add(decoder_ids, answer_params, source, reads_texts=True)
                    streams.append(Stream(sequence, self.tokenizer, index))
            except Exception:
                for stream in streams:
                    self.engine.cancel(stream.sequence)
                raise
        return streams

    def check(
        self, prompt: TokenPrompt, params: SamplingParams
    ) -> list[int | EmbeddedInput] | EncoderFeatures:
        """Return a prompt without texts, checked for ``start``. Any thread may call this.

        Token ids are returned as plain integers.

        Raises: RequestError: the prompt or a parameter is unusable.
        """
        self._check_stop(params)
        self.tokenizer.read()  # may fail: read before anything is queued
        decoder_ids, source = self._split_prompt(prompt)
        tokens = self.engine.check(decoder_ids, params, source)
        if source is None:
            return tokens
        checked = self.engine.checked_source(source)
        return prompt if isinstance(prompt, EncoderFeatures) else [*checked]

    def room(self, prompt: TokenPrompt) -> int:
        """Return how many tokens may follow a prompt; 0 or less if the prompt is too long."""
        return self.engine.runner.max_sequence_tokens - num_tokens(self._split_prompt(prompt)[0])

    def _check_stop(self, params: SamplingParams) -> None:
        if params.stop and isinstance(self.tokenizer, MissingTokenizer):
            raise RequestError(
                f"stop is {params.stop!r}, but {self.path} holds no tokenizer to find texts with. "
                "Try: stop_token_ids, or add a tokenizer.json"
            )

    def _split_prompt(self, prompt: TokenPrompt) -> tuple[PromptTokens, Source | None]:
        """Return the decoder's first tokens, and the encoder input if the model has an encoder."""
        if isinstance(prompt, EncoderFeatures):
            if self.engine.runner.encoder_inputs is None:
                raise RequestError(
                    "The prompt holds features for an encoder, but the model has no encoder. "
                    "Try: a text or token ids"
                )
            return prompt.decoder_ids or self.engine.start_token_ids, prompt
        if self.engine.runner.encoder_inputs is None:
            return prompt, None
        return self.engine.start_token_ids, cast("Sequence[int]", prompt)

    def _deltas(self, streams: Sequence[Stream]) -> Iterator[Delta | None]:
        """Yield None once, so that the generator is started, and then the deltas of all streams."""
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
        """Cancel unfinished answers of the streams after the current step."""

        def cancel() -> None:
            for stream in streams:
                self.engine.cancel(stream.sequence)

        if self._is_closed:
            return
        if any(stream.sequence.finish_reason is None for stream in streams):
            self.engine.lock.call_soon(cancel)

    def _read(self, stream: Stream) -> list[Delta]:
        deltas = []
        while stream.num_unread and not stream.ended:
            deltas.append(stream.read())
        # Raise only after the caller got the tokens before the error.
        if stream.sequence.error is not None and not deltas:
            raise stream.sequence.error
        if stream.ended:
            self.engine.cancel(stream.sequence)
        return deltas


def num_weights(model: torch.nn.Module) -> int:
    """Return the number of elements of the model's matrices on this rank, before packing."""
    from interposer_engine._bench.roofline import ModelWork
    from interposer_ops.layers.embedding import Embedding

    # ``ModelWork`` counts a shared table as the head, and leaves other tables out.
    tables = {
        module: module.vocab_size * module.hidden_size
        for module in model.modules()
        if isinstance(module, Embedding) and not module.is_tied
    }
    return ModelWork.of(cast(Any, model)).numbers + sum(tables.values())


def requests(
    prompts: str | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    settings: dict[str, Any],
    n: int,
) -> list[tuple[Prompt, SamplingParams]]:
    """Return a request for each prompt: the prompt paired with its sampling parameters.

    Raises: RequestError: there is no prompt, ``n`` is not positive, or parameters are given twice
        or for another number of prompts.
    """
    _check_type("prompts", prompts, _PROMPTS)
    if type(n) is not int or n < 1:
        raise RequestError(f"n is {n!r}, must be an integer of at least 1")
    texts: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
    # One number is named by its own type: ``stream`` and others pass one prompt in a list.
    if len(texts) > 1 and hasattr(texts[0], "__index__") and not is_listing(texts[0]):
        ids = ", ".join(map(str, texts[:3])) + (", ..." if len(texts) > 3 else "")
        raise RequestError(
            f"prompts is [{ids}], must be {_PROMPTS}. "
            f"Try: generate([[{ids}]]) if these are the token ids of one prompt"
        )
    return [*zip(texts, chosen_params(params, settings, len(texts)), strict=True)]


def continuations_of(prompt: TextPrompt, continuations: Sequence[TextPrompt]) -> list[TextPrompt]:
    """Return the continuations of a prompt as a list of texts or token lists.

    Raises: RequestError: the prompt or a continuation has another type.
    """
    allowed = "a text or a list of token ids"
    _check_type("prompt", prompt, allowed)
    if isinstance(continuations, str):  # iterating a text would score its letters
        raise RequestError(
            f"continuations is the text {continuations!r:.100}, must be a list. "
            f"Try: [{continuations!r:.100}]"
        )
    _check_type("continuations", continuations, "a list of texts or of lists of token ids")
    continuation_list = list(continuations)
    for index, continuation in enumerate(continuation_list):
        _check_type(f"continuations[{index}]", continuation, allowed)
    return continuation_list


def _check_type(name: str, value: object, allowed: str) -> None:
    """Raise RequestError unless ``value`` is a text or an ordered collection."""
    if not is_listing(value):
        raise RequestError(
            f"{name} is {value!r:.100} of the type {type(value).__name__}, must be {allowed}"
        )


def token_ids_of(prompt: Prompt, tokenizer: TextTokenizer) -> TokenPrompt:
    """Return the tokens of a prompt, which is a text or holds no text already."""
    if not isinstance(prompt, str):
        return prompt
    # An empty text is refused later, even if the tokenizer would add a special token.
    return tokenizer.encode(prompt) if prompt else []


def target_ids(text: TextPrompt, tokenizer: TextTokenizer, starts: Sequence[int]) -> list[int]:
    """Return the tokens that an encoder-decoder's decoder starts with, then those of a text."""
    if not isinstance(text, str):
        return [*starts, *cast("Sequence[int]", text)]
    tokens = tokenizer.encode(text)
    # The tokenizer may add the forced first token, which the start tokens contain already.
    is_forced = len(starts) > 1 and tokens[:1] == [starts[1]]
    return [*starts, *tokens[is_forced:]]


def completions(streams: Sequence[Stream], n: int) -> list[Completion]:
    """Return the completions of streams, of which ``n`` consecutive ones answer one prompt."""
    results: list[Completion] = []
    for index, stream in enumerate(streams):
        completion = stream.completion()
        # Only the first answer to a prompt computed the prompt's log probabilities.
        if index % n and (shared := results[-1].prompt_logprobs):
            completion = replace(completion, prompt_logprobs=shared)
        results.append(completion)
    return results
