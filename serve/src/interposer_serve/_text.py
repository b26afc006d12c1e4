"""Endpoints of a model that generates text, with the queue limit and event streams."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from interposer.errors import ConfigError, InterposerError, RequestError, install_command
from interposer_engine import (
    AsyncLanguageModel,
    Compiled,
    Constraint,
    EmbeddedInput,
    LanguageModel,
    Media,
    TextTokenizer,
)
from interposer_engine.answers import AnswerReader, PlainReader
from interposer_engine.parts import num_tokens
from interposer_serve._answering import Answering, cache_salt
from interposer_serve._attachments import RESPONSES_FORM
from interposer_serve._details import model_details
from interposer_serve._endpoints import Answer, Endpoints
from interposer_serve._errors import ApiError
from interposer_serve._format import Format
from interposer_serve._formats import ChatFormat, CompletionFormat, Echo, template_messages
from interposer_serve._limits import Limits
from interposer_serve._media import MediaReader
from interposer_serve._messages import MessagesBody, MessagesFormat, TokenCountBody
from interposer_serve._reading import PromptSizes
from interposer_serve._requests import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SampledBody,
    TokenizeBody,
)
from interposer_serve._responses import ResponsesBody, ResponsesFormat, chat_messages
from interposer_serve._speech import PATHS as SPEECH_PATHS
from interposer_serve._speech import SpeechAnswering
from interposer_serve._speech_requests import SpeechBody, TranscriptionBody, TranslationBody
from interposer_serve._stored_responses import StoredResponses
from interposer_serve._telemetry import ModelMetrics

_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens
_log = logging.getLogger("interposer")
B = TypeVar("B", bound=Body)


class TextEndpoints(Endpoints):
    """The endpoints of one generating model: chats, completions and tokens, or transcripts."""

    def __init__(
        self,
        lm: LanguageModel,
        name: str,
        limits: Limits,
        metrics: ModelMetrics,
        stored: StoredResponses,
        media: MediaReader,
    ) -> None:
        """Prepare the endpoints, without starting the model's threads.

        Raises: ConfigError: an adapter has the name of the model.
        """
        if name in lm.adapters:
            raise ConfigError(
                f"The model and an adapter are both called {name!r}. Try: another name of the model"
            )
        self.name = name
        self.context = lm.engine.model.config.max_position_embeddings
        self._lm = lm
        self._limits = limits
        self._metrics = metrics
        self._stored = stored
        self._media = media
        self._is_started = False
        self._sizes: PromptSizes
        self._model: AsyncLanguageModel
        self._answering: Answering
        encoder_inputs = lm.engine.runner.encoder_inputs
        hears = encoder_inputs is not None and encoder_inputs.reads_features
        self._speech = SpeechAnswering(lm, limits) if hears else None
        self.capabilities = ["transcription"] if hears else ["completion"]

    @property
    def available(self) -> Collection[str]:
        """The paths of a model of texts, or of one that hears."""
        if self._speech is None:
            return self.paths.keys() - SPEECH_PATHS
        return SPEECH_PATHS | {"/detokenize"}

    async def start(self) -> None:
        """Start the model's threads, and load everything that a first request would load."""
        limits = self._limits
        self._model = AsyncLanguageModel(
            self._lm,
            max_waiting=limits.queue,
            constraint_limits=limits.constraints,
            template_seconds=limits.template_seconds,
        )
        self._answering = Answering(self._model, self._lm, self.name, limits, self._metrics)
        vocabulary = await self._model.tokenize(lambda tokenizer: tokenizer.vocabulary)
        # The prompt of an encoder-decoder model goes to the encoder, which may take longer inputs.
        sources = self._lm.engine.runner.encoder_inputs
        context = max(self.context, 0 if sources is None else sources.longest)
        num_tokens = min(context, limits.prompt_tokens or context)
        self._sizes = PromptSizes(num_tokens, self._model.capacity or 1, vocabulary)
        self._metrics.watch(self._lm.engine)
        self._is_started = True
        if not _has_constraints():
            _log.info(
                "Structured output is off: it needs the package llguidance. Try: %s",
                install_command("interposer-engine[constraints]"),
            )
        try:
            await self._model.load_chat_template()
        except InterposerError:
            return  # completions work without a chat template; each chat gets this error

    @property
    def num_unfinished(self) -> int:
        """Number of answers that run or wait."""
        num_transcripts = 0 if self._speech is None else self._speech.num_unfinished
        return self._model.num_unfinished + num_transcripts if self._is_started else 0

    def end_answers(self) -> None:
        """End every unfinished answer with an error."""
        if self._is_started:
            self._answering.end()
        if self._speech is not None:
            self._speech.end()

    async def stop(self) -> None:
        """End the model's threads."""
        if self._is_started:
            self._metrics.forget()
            if self._speech is not None:
                await self._speech.stop()
            await self._model.aclose()

    @property
    def details(self) -> Mapping[str, Any]:
        """Dtype and quantization of the model."""
        return model_details(self._lm)

    @property
    def trouble(self) -> str:
        """Reason why requests would fail; "" if no reason is known."""
        return self._model.trouble if self._is_started else ""

    async def explanation(self) -> dict[str, Any]:
        """Return the explanation of the kernels that the model uses.

        With several ranks, the result is that of rank 0, with the field ``ranks`` for all of them.
        """
        explanations = await self._model.call(self._lm.explanations)
        first = explanations[0]
        return {**first, "ranks": explanations} if len(explanations) > 1 else first

    @property
    def names(self) -> Collection[str]:
        """Served names of the model and its adapters."""
        return self.name, *self._lm.adapters

    async def chat(self, request: Request, content: dict[str, Any]) -> Response:
        """Answer a chat: ``/v1/chat/completions``."""
        body = self._read(content, ChatBody)
        formatter = ChatFormat(
            body.model,
            self._spell,
            tells_logprobs=body.logprobs,
            tells_usage=body.tells_usage,
            tells_prompt=body.prompt_logprobs is not None,
        )
        return await self._answer_chat(request, body, formatter)

    async def _answer_chat(self, request: Request, body: ChatBody, formatter: Format) -> Response:
        """Return the next message of a conversation, in the format of any API."""
        tools, required = body.offered, body.required
        async with self._answering.preparing(request, body.n):
            token_ids, prompt = await self._chat_prompt(
                request,
                body,
                body.messages,
                tools,
                body.chat_template_kwargs,
                body.reasoning_effort,
            )
            constraint = body.constraint
            if required is not None:
                constraint = await self._call_constraint(required, token_ids)
            field = body.constraint_field if required is None else "tools"
            compiled = await self._compiled(constraint, field)
            new_reader: Callable[[], AnswerReader] = PlainReader
            # A constraint on the text leaves no place for reasoning and calls.
            if body.constraint is None:
                new_reader = await self._model.format_answer(
                    lambda tokenizer: partial(tokenizer.chat.reader, token_ids, tools)
                )
        return await self._answering.respond(
            request,
            body,
            [prompt],
            formatter,
            new_reader,
            max_new_tokens=self.context,
            compiled=compiled,
        )

    async def respond(self, request: Request, content: dict[str, Any]) -> Response:
        """Answer a request of OpenAI's newer API: ``/v1/responses``."""
        body = self._read(content, ResponsesBody)
        client, earlier_messages = request.state.client, list[dict[str, Any]]()
        if body.previous_response_id is not None:
            previous = self._stored.get(client, body.previous_response_id, "previous_response_id")
            earlier_messages = previous["messages"]
            kinds, limit = self._lm.media_kinds, self._limits.media
            RESPONSES_FORM.attach(earlier_messages, kinds, limit, "previous input")
        chat = self._checked(body.chat(earlier_messages))

        def store(response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
            if body.store:
                # The prompt of a later request must not hold half of a call.
                continued_items = [
                    item
                    for item in items
                    if item["type"] != "function_call" or item["status"] == "completed"
                ]
                messages = [*earlier_messages, *body.input_messages()]
                messages += chat_messages("output", continued_items)
                self._stored.add(client, response, body.input_items(), messages)

        return await self._answer_chat(request, chat, ResponsesFormat(body, store))

    async def message(self, request: Request, content: dict[str, Any]) -> Response:
        """Answer a request of Anthropic's API: ``/v1/messages``."""
        body = self._read(content, MessagesBody)
        formatter = MessagesFormat(body, self._lm.tokenizer.decode)
        return await self._answer_chat(request, self._checked(body.chat()), formatter)

    async def count_tokens(self, request: Request, content: dict[str, Any]) -> Response:
        """Count the tokens of a prompt: ``/v1/messages/count_tokens``."""
        chat = self._read(content, TokenCountBody).chat()
        async with self._answering.preparing(request, 1):
            _, prompt = await self._chat_prompt(
                request, chat, chat.messages, chat.offered, chat.chat_template_kwargs
            )
        return JSONResponse({"input_tokens": num_tokens(prompt)})

    async def complete(self, request: Request, content: dict[str, Any]) -> Response:
        """Complete a prompt: ``/v1/completions``."""
        body = self._read(content, CompletionBody)
        async with self._answering.preparing(request, body.n * len(body.prompts)):
            token_lists = [
                await self._encoded(prompt) if isinstance(prompt, str) else prompt
                for prompt in body.prompts
            ]
            compiled = await self._compiled(body.constraint, body.constraint_field)
            echoes: list[Echo] = []
            for prompt, token_ids in zip(body.prompts, token_lists, strict=True):
                if body.echo:
                    echoes.append(await self._echo(prompt, token_ids))
        formatter = CompletionFormat(
            body.model,
            self._spell,
            num_likely=body.logprobs,
            tells_usage=body.tells_usage,
            echoes=[echo for echo in echoes for _ in range(body.n)],
            tells_prompt=body.prompt_logprobs is not None,
            has_answer=body.has_answer,
        )
        return await self._answering.respond(
            request,
            body,
            [list[int | EmbeddedInput](token_ids) for token_ids in token_lists],
            formatter,
            PlainReader,
            max_new_tokens=_DEFAULT_COMPLETION_TOKENS,
            compiled=compiled,
        )

    async def tokenize(self, request: Request, content: dict[str, Any]) -> Response:
        """Return the token ids of a text, or of a chat's prompt: ``/tokenize``."""
        body = self._read(content, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "Give either prompt or messages", param="prompt")
        async with self._answering.preparing(request, 1):
            if body.messages is not None:
                tokens, prompt = await self._chat_prompt(
                    request, body, body.messages, body.tools or None, body.chat_template_kwargs
                )
                count = num_tokens(prompt)
            else:
                tokens = await self._encoded(body.prompt or "")
                count = len(tokens)
        result = {"count": count, "max_model_len": self.context, "tokens": tokens}
        return JSONResponse(result)

    async def detokenize(self, request: Request, content: dict[str, Any]) -> Response:
        """Return the text of token ids: ``/detokenize``."""
        body = self._read(content, DetokenizeBody)
        tokens = self._lm.engine.checked_tokens(body.tokens)
        async with self._answering.preparing(request, 1):
            text = await self._model.format_answer(lambda tokenizer: tokenizer.decode(tokens))
        return JSONResponse({"prompt": text})

    async def transcribe(self, request: Request, content: dict[str, Any]) -> Response:
        """Write the text of speech: ``/v1/audio/transcriptions``."""
        return await self._transcript(request, TranscriptionBody.read(content))

    async def translate(self, request: Request, content: dict[str, Any]) -> Response:
        """Write the text of speech in English: ``/v1/audio/translations``."""
        return await self._transcript(request, TranslationBody.read(content))

    async def _transcript(self, request: Request, body: SpeechBody) -> Response:
        assert self._speech is not None  # only such models have these paths
        return await self._speech.respond(request, body)

    paths: ClassVar[Mapping[str, tuple[Answer, type[Body]]]] = {
        "/v1/chat/completions": (chat, ChatBody),
        "/v1/completions": (complete, CompletionBody),
        "/v1/responses": (respond, ResponsesBody),
        "/v1/messages": (message, MessagesBody),
        "/v1/messages/count_tokens": (count_tokens, TokenCountBody),
        "/v1/audio/transcriptions": (transcribe, TranscriptionBody),
        "/v1/audio/translations": (translate, TranslationBody),
        "/tokenize": (tokenize, TokenizeBody),
        "/detokenize": (detokenize, DetokenizeBody),
    }

    async def load_adapter(self, name: str, path: str, *, replace: bool) -> None:
        """Load a LoRA adapter between two steps; see ``LanguageModel.load_adapter``."""
        await self._model.call(self._lm.load_adapter, name, path, replace=replace)

    async def remove_adapter(self, name: str) -> None:
        """Remove a LoRA adapter between two steps; see ``LanguageModel.remove_adapter``."""
        await self._model.remove_adapter(name)

    async def update_weights(self, tensors: Any) -> Collection[str]:
        """Replace weights between two steps; see ``LanguageModel.update_weights``."""
        return await self._model.update_weights(tensors)

    def _read(self, content: dict[str, Any], body_type: type[B]) -> B:
        """Validate the parsed body of a request, whose attachments are taken out of it.

        Raises: ApiError: a prompt is too large, a field is unusable, or two contradict each other.
        """
        if (form := body_type.attachment_form) is not None:
            kinds, limit = self._lm.media_kinds, self._limits.media
            form.attach(content.get(form.field), kinds, limit, advice=self._lm.media_advice)
        self._sizes.check(content)
        return self._checked(body_type.read(content))

    @staticmethod
    def _checked(body: B) -> B:
        """Return the request body if its fields do not contradict each other.

        Raises: ApiError: two fields contradict each other.
        """
        if isinstance(body, SampledBody):
            body.check()
        return body

    def _spell(self, token_id: int) -> str:
        return self._lm.tokenizer.decode([token_id])

    async def _encoded(self, text: str) -> list[int]:
        # Refuse an empty prompt later, even if the tokenizer would add a special token to it.
        return await self._model.tokenize(lambda tokenizer: tokenizer.encode(text) if text else [])

    async def _chat_prompt(
        self,
        request: Request,
        body: ChatBody | TokenizeBody,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
        effort: str | None = None,
    ) -> tuple[list[int], list[int | EmbeddedInput]]:
        """Return the token ids that the chat template writes, and the prompt with media encoded.

        Raises: ApiError: a medium cannot be read.
        """
        kinds = self._lm.media_kinds
        param = body.own_names.get("messages", "messages")
        salt = cache_salt(request, body.cache_salt)

        async with self._media.reading(messages, param) as read_messages:

            def rendered(tokenizer: TextTokenizer) -> tuple[list[int], list[Media]]:
                chat = tokenizer.chat
                effort_options = {} if effort is None else chat.reasoning_options(effort)
                plain = template_messages(read_messages, tokenizer, kinds)
                template_options = {**effort_options, **options}
                rendered_chat = chat.render(plain, tools, None, template_options, kinds)
                return rendered_chat.token_ids, rendered_chat.media

            token_ids, media = await self._model.render_chat(rendered)
            try:
                prompt = await self._model.media_prompt(token_ids, media, cache_salt=salt)
            except RequestError as error:
                raise ApiError(400, str(error), param=param, code="media_not_read") from None
        return token_ids, prompt

    async def _echo(self, prompt: str | list[int], token_ids: list[int]) -> Echo:
        tokens = self._lm.engine.checked_tokens(token_ids)
        pieces = await self._model.format_answer(lambda tokenizer: tokenizer.pieces(tokens))
        return Echo(prompt if isinstance(prompt, str) else "".join(pieces), tokens, pieces)

    async def _call_constraint(self, tools: list[dict[str, Any]], prompt: list[int]) -> Constraint:
        try:
            return await self._model.format_answer(
                lambda tokenizer: tokenizer.chat.call_constraint(tools, prompt)
            )
        except RequestError as error:
            raise ApiError(400, str(error), param="tool_choice", code="not_honoured") from None

    async def _compiled(self, constraint: Constraint | None, param: str) -> Compiled | None:
        """Compile a request's constraint in a thread, so that the event loop does not wait.

        Raises: ApiError: the constraint is malformed, or exceeds a limit.
        """
        if constraint is None:
            return None
        if not _has_constraints():
            message = f"{param} asks for structured output, which is not available on this server"
            raise ApiError(400, message, param=param, code="not_available")
        try:
            return await self._model.compile_constraint(constraint)
        except RequestError as error:
            message = f"{param} has a constraint that cannot be used: {error}"
            raise ApiError(400, message, param=param, code="invalid_value") from None


def _has_constraints() -> bool:
    """Return whether the package that compiles constraints is installed."""
    return find_spec("llguidance") is not None
