"""Pydantic models of the request bodies, with only neutral values of unsupported fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    create_model,
    model_validator,
)

from interposer.errors import RequestError, UnknownNameError
from interposer_engine import Constraint, SamplingParams
from interposer_serve._attachments import CHAT_FORM, CHAT_SCHEMAS, AttachmentForm
from interposer_serve._errors import ApiError, shown

_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 4096
_MAX_TOKEN_IDS = 4096
_MAX_DIGITS = 18
_INT64_MAX = 2**63 - 1

# Fields of OpenAI's API that have no effect here, with the values that change no answer and so are
# accepted. null is always accepted.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "dimensions": (),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),  # the chat template decides
    "prediction": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default", "flex", "priority", "scale"),  # all have equal priority
    "store": (False, True),  # nothing is stored
    "suffix": ("",),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
# Fields that identify the user or the request. They do not change the answer, so any text is
# accepted, or any object of texts.
_LABELS = ("prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user")
_LABEL_OBJECTS = ("metadata",)
_HINTS = {
    "functions": "tools",
    "function_call": "tools",
    "suffix": "a prompt that holds both parts",
    "top_logprobs": "logprobs, which is the number of likely tokens here",
    "echo": "a last message of the assistant that holds the start of the answer",
    "dimensions": "leave it out, and truncate the vectors if the model was trained for that",
}


def _as_tuple(value: object) -> object:
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _with_integers(value: object) -> object:
    """Convert the keys of a JSON object from texts to token ids.

    Raises: ValueError: a key is not a token id, or a value is not a bias.
    """
    if not isinstance(value, dict):
        return value
    if len(value) > _MAX_TOKEN_IDS:
        raise ValueError("too many token ids")
    biases: dict[int, object] = {}
    for key, bias in value.items():
        # Python hashes an integer modulo 2^61 - 1. With more digits, a client could choose many
        # integers of equal hash, which makes the dict quadratically slow.
        if not (key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS):
            raise ValueError(f"{key!r:.100} is not a token id")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError(f"{bias!r:.100} is not a bias")
        biases[int(key)] = float(bias)
    return biases


def _checked_texts(value: object) -> object:
    """Return the value of a field like ``metadata``.

    Raises: ValueError: the value is not an object of texts. pydantic would report each wrong text.
    """
    if not _holds_texts(value):
        raise ValueError("not an object of texts")
    return value


# The description of a field becomes part of the error message: "n is 0; allowed is <description>".
_Text = Annotated[str, Field(min_length=1)]
# Each new token is compared with all stop texts, so their number and length are limited.
_Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
_TextOrTexts = BeforeValidator(
    _as_tuple,
    json_schema_input_type=_Stop | Annotated[list[_Stop], Field(max_length=_MAX_STOPS)],
)
_List = BeforeValidator(_as_tuple, json_schema_input_type=list[int])
_Flag = Annotated[bool, Field(description="true or false")]
_TokenId = Annotated[int, Field(ge=0, le=_INT64_MAX)]
# Stop validating a list at its first wrong item: pydantic reports each error, and a million errors
# would take minutes. Objects derive from ``BodyPart`` for the same reason.
_FAIL_FAST: Any = Field(fail_fast=True)
_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": {
            "anyOf": [
                {"type": ["string", "null"]},
                {"type": "array", "items": {"anyOf": [_TEXT_PART, *CHAT_SCHEMAS]}},
            ]
        },
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
            },
        },
    },
}
# The OpenAPI document describes messages and tools, which are checked when the template reads them.
_Messages = Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_MESSAGE)]], _FAIL_FAST]
_Tools = Annotated[list[Annotated[dict[str, Any], WithJsonSchema(_TOOL)]], _FAIL_FAST]
_TokenIds = Annotated[list[_TokenId], _FAIL_FAST]
_Texts = Annotated[
    tuple[_Stop, ...],
    Field(max_length=_MAX_STOPS, fail_fast=True),
    _TextOrTexts,
    Field(
        description=f"a text or up to {_MAX_STOPS} texts of 1 to {_MAX_STOP_CHARACTERS} characters"
    ),
]
_Positive = Annotated[int, Field(ge=1, le=_INT64_MAX, description="an integer of at least 1")]
_NumTokens = Annotated[int, Field(ge=0, le=_INT64_MAX)]
_Count = Annotated[int, Field(ge=1, le=128, description="an integer from 1 to 128")]
_Likely = Annotated[int, Field(ge=0, le=20, description="an integer from 0 to 20")]
_Bias = Annotated[
    dict[Annotated[int, Field(ge=0, le=_INT64_MAX)], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=_MAX_TOKEN_IDS),
    BeforeValidator(_with_integers, json_schema_input_type=dict[str, float]),
]
_CacheSalt = Annotated[str, Field(max_length=1024, description="a text of up to 1024 characters")]
_Some: Any = Field(min_length=1, fail_fast=True)
_Prompt = Annotated[
    _Text
    | Annotated[list[str], _Some]
    | Annotated[list[_TokenId], _Some]
    | Annotated[list[_TokenIds], _Some],
    Field(description="a text, texts, token ids or a list of those, none empty"),
]


# Names for the bodies of other modules.
FAIL_FAST = _FAIL_FAST
INT64_MAX = _INT64_MAX
SOME = _Some
CacheSalt = _CacheSalt
Flag = _Flag
Positive = _Positive
Prompt = _Prompt
Text = _Text
ObjectOfTexts = Annotated[dict[str, str], BeforeValidator(_checked_texts)]


def accepted_schemas() -> dict[str, dict[str, Any]]:
    """Return JSON schemas of the accepted values of fields that change no answer, by field name."""
    text_or_null = {"type": ["string", "null"]}
    texts_or_null = {"type": ["object", "null"], "additionalProperties": {"type": "string"}}
    return {
        **{name: {"enum": [*values, None]} for name, values in _NEUTRAL.items()},
        **dict.fromkeys(_LABELS, text_or_null),
        **dict.fromkeys(_LABEL_OBJECTS, texts_or_null),
    }


class BodyPart(BaseModel):
    """Base of the objects in request bodies, which refuse unknown fields with a single error.

    As in the body itself, a field with the value null counts as left out.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        names = {field.alias or name for name, field in cls.model_fields.items()}
        if any(name not in names for name in value):
            raise ValueError("unknown field")
        return {name: item for name, item in value.items() if item is not None}


class Body(BaseModel):
    """Base of the request bodies, which refuse unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    media_type: ClassVar[str] = "application/json"
    own_names: ClassVar[Mapping[str, str]] = {}
    """Names that the client's API has for fields, where they differ. Errors use these names."""
    attachment_form: ClassVar[AttachmentForm | None] = None
    """How the API writes pictures and sounds; None for a body without them."""

    # Without a model, the server's default model answers.
    model: str = Field("", description="a text")

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        """Validate a parsed JSON object, and return the request body.

        Raises: ApiError: a field is unknown, unsupported or out of range. The message names the
            field, its value and the allowed values.
        """
        fields = {name: value for name, value in body.items() if value is not None}
        for name, value in [*fields.items()]:
            if name in cls.model_fields:
                continue
            if name in _LABELS or name in _LABEL_OBJECTS:
                is_valid = isinstance(value, str) if name in _LABELS else _holds_texts(value)
                if not is_valid:
                    allowed = "a text" if name in _LABELS else "an object of texts"
                    message = f"{name} is {shown(value)}; allowed is {allowed}"
                    raise ApiError(400, message, param=name, code="invalid_value")
                del fields[name]
            elif name in _NEUTRAL:
                # 1 == True in Python, but not in JSON.
                if not any(
                    type(value) is type(allowed) and value == allowed for allowed in _NEUTRAL[name]
                ):
                    raise _unsupported(name, value)
                del fields[name]
            else:
                unknown = UnknownNameError("field", name, cls.model_fields)
                raise ApiError(400, str(unknown), param=name[:100], code="unknown_field")
        try:
            return cls(**fields)
        except ValidationError as error:
            raise _invalid(cls, error, fields) from None


def _holds_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for text in value.values())


def _unsupported(name: str, value: Any) -> ApiError:
    allowed = " or ".join(map(repr, (*_NEUTRAL[name], None)))
    hint = f". Try: {_HINTS[name]}" if name in _HINTS else ""
    message = f"{name} is {shown(value)}, which is not honoured here; allowed is {allowed}{hint}"
    return ApiError(400, message, param=name, code="not_honoured")


def _invalid(cls: type[Body], error: ValidationError, fields: dict[str, Any]) -> ApiError:
    first = error.errors()[0]
    name = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        required = ", ".join(n for n, field in cls.model_fields.items() if field.is_required())
        return ApiError(400, f"{name} is missing; needed are {required}", param=name)
    value, allowed = fields[name], cls.model_fields[name].description
    name = cls.own_names.get(name, name)
    match first["loc"][1:2], value:
        case (int(index),), [dict(), *_]:
            # A list of tools is long, and only one of them is wrong.
            message = f"{name}[{index}] is {shown(value[index])}; {name} must be {allowed}"
        case _:
            message = f"{name} is {shown(value)}; allowed is {allowed}"
    return ApiError(400, message, param=name, code="invalid_value")


_FORMATS = (
    "{'type': 'text'}, {'type': 'json_object'} or "
    "{'type': 'json_schema', 'json_schema': {'name': ..., 'schema': {...}}}"
)
_KINDS: Mapping[str, Callable[[Any], Constraint]] = {
    "json": Constraint.json_schema,
    "regex": Constraint.regex,
    "choice": Constraint.choice,
    "grammar": Constraint.grammar,
}


def _of_response_format(value: dict[str, Any], param: str) -> Constraint | None:
    """Return the constraint for OpenAI's field ``response_format``; None for unrestricted text.

    Args:
        param: Name of the field in the client's API, for errors.
    Raises: ApiError: the type is unknown, or the schema is invalid.
    """
    kind, json_schema = value.get("type"), value.get("json_schema")
    if kind == "text" and len(value) == 1:
        return None
    if kind == "json_object" and len(value) == 1:
        return Constraint.json_object()
    if kind == "json_schema" and len(value) == 2 and isinstance(json_schema, dict):
        unknown = json_schema.keys() - {"name", "description", "schema", "strict"}
        if not unknown and isinstance(json_schema.get("schema"), dict):
            return _create(Constraint.json_schema, json_schema["schema"], param)
    message = f"{param} is {shown(value)}; allowed is {_FORMATS}"
    raise ApiError(400, message, param=param, code="invalid_value")


def _of_structured_outputs(value: dict[str, Any]) -> Constraint:
    """Return the constraint for vLLM's field ``structured_outputs``.

    Raises: ApiError: the field does not have exactly one known key, or the value is malformed.
    """
    if len(value) != 1 or not value.keys() <= _KINDS.keys():
        allowed = ", ".join(f"{name!r}" for name in _KINDS)
        raise ApiError(
            400,
            f"structured_outputs is {shown(value)}; allowed is an object with one of {allowed}",
            param="structured_outputs",
            code="invalid_value",
        )
    ((name, content),) = value.items()
    return _create(_KINDS[name], content, "structured_outputs")


def _create(constructor: Callable[[Any], Constraint], content: Any, param: str) -> Constraint:
    try:
        return constructor(content)
    except RequestError as error:
        message = f"{param} is malformed: {error}"
        raise ApiError(400, message, param=param, code="invalid_value") from None


def check_tool_types(tools: object, allowed: Sequence[str]) -> None:
    """Refuse tools that a server of the API's publisher runs, such as a web search.

    Args:
        tools: Value of the field ``tools``; other wrong values are refused later.
        allowed: Types of tools that the client runs; a tool without a type is one of them.
    Raises: ApiError: a tool has another type.
    """
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind is not None and kind not in allowed:
            message = (
                f"tools[{index}] has the type {shown(kind)}; allowed is "
                f"{' or '.join(map(repr, allowed))}. This server runs no tools. Try: leave the "
                "tool out, or a function that your program runs"
            )
            raise ApiError(400, message, param="tools", code="not_honoured")


class StreamOptions(BodyPart):
    """Options of a streamed response: the request field ``stream_options``."""

    include_usage: bool = False
    # OpenAI's events have random padding, which these have not.
    include_obfuscation: Literal[False] = False


class _WithLengths(Body):
    """Request fields for the number and length of the answers."""

    n: _Count = 1
    max_tokens: _Positive | None = Field(None, description="an integer of at least 1")


_SAMPLING_FIELDS = SamplingParams.request_fields()
if TYPE_CHECKING:  # mypy does not take a created class as a base

    class _WithSamplingFields(_WithLengths):
        min_tokens: int
        prompt_logprobs: int | None
else:
    _WithSamplingFields = create_model(
        "_WithSamplingFields", __base__=_WithLengths, **_SAMPLING_FIELDS
    )


class SampledBody(_WithSamplingFields):
    """Base of the request bodies for generated text: sampling, output form and streaming."""

    # Sampling fields with another form in JSON, or with a limit on the work for a client.
    stop: _Texts = ()
    stop_token_ids: Annotated[tuple[_TokenId, ...], _FAIL_FAST, _List] = Field(
        (), max_length=_MAX_TOKEN_IDS, description=f"a list of up to {_MAX_TOKEN_IDS} token ids"
    )
    logit_bias: _Bias = Field(
        {}, description=f"up to {_MAX_TOKEN_IDS} token ids with numbers from -100 to 100"
    )

    response_format: dict[str, Any] | None = Field(None, description="an object with a type")
    structured_outputs: dict[str, Any] | None = Field(
        None, description="an object with 'json', 'regex', 'choice' or 'grammar'"
    )
    cache_salt: _CacheSalt = ""
    stream: _Flag = False
    # Without a stream, the options have no effect.
    stream_options: StreamOptions | None = Field(
        None, description='{"include_usage": true or false}'
    )

    @cached_property
    def constraint(self) -> Constraint | None:
        """Constraint on the text of the answer; None for unrestricted text.

        Raises: ApiError: the constraint is malformed, or both fields have one.
        """
        constraint = None
        if self.response_format is not None:
            constraint = _of_response_format(self.response_format, self._format_name)
        if self.structured_outputs is None:
            return constraint
        if constraint is not None:
            message = "response_format and structured_outputs are both given. Try: one of them"
            raise ApiError(400, message, param="structured_outputs")
        return _of_structured_outputs(self.structured_outputs)

    @property
    def constraint_field(self) -> str:
        """Name of the request field that sets the constraint."""
        return self._format_name if self.structured_outputs is None else "structured_outputs"

    @property
    def _format_name(self) -> str:
        return self.own_names.get("response_format", "response_format")

    @property
    def num_likely(self) -> int:
        """Number of most likely tokens to report for each position of the answer."""
        return 0

    @property
    def num_prompt_likely(self) -> int | None:
        """Number of most likely tokens to report for each prompt position; None to report none."""
        return self.prompt_logprobs

    def params(
        self, suggested: dict[str, Any], max_new_tokens: int, constraint: Constraint | None
    ) -> SamplingParams:
        """Return the sampling parameters of the first of the ``n`` answers.

        Args:
            suggested: Defaults for fields that the request leaves out.
            max_new_tokens: Default limit on new tokens.
            constraint: Constraint on the answers.
        """
        requested = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        requested["prompt_logprobs"] = self.num_prompt_likely
        return SamplingParams(
            **{**suggested, **requested},
            max_new_tokens=self.max_tokens or max_new_tokens,
            constraint=constraint,
            top_logprobs=self.num_likely,
        )

    @property
    def tells_usage(self) -> bool:
        """Whether the last chunk of a stream reports the token usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Raise ApiError if two fields of the request contradict each other."""
        if self.prompt_logprobs is not None and self.stream:
            message = 'prompt_logprobs is given with "stream": true. Try: one of them'
            raise ApiError(400, message, param="prompt_logprobs")
        if self.min_tokens and self.constraint is not None:
            message = "min_tokens cannot be combined with a constraint. Try: leave min_tokens out"
            raise ApiError(400, message, param="min_tokens")


class CompletionBody(SampledBody):
    """Request body of ``/v1/completions``."""

    prompt: _Prompt
    max_tokens: _NumTokens | None = Field(None, description="an integer of at least 0")
    logprobs: _Likely | None = Field(None, description="an integer from 0 to 20")
    echo: _Flag = False

    @property
    def num_likely(self) -> int:
        """Number of most likely tokens to report for each position of the answer."""
        return self.logprobs or 0

    @property
    def num_prompt_likely(self) -> int | None:
        """Number of most likely tokens to report for each prompt position; None to report none."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)

    @property
    def has_answer(self) -> bool:
        """Whether the response has new tokens, and not only the prompt."""
        return self.max_tokens != 0

    def check(self) -> None:
        """Raise ApiError if two fields of the request contradict each other."""
        super().check()
        if self.has_answer:
            return
        if not self.echo and self.prompt_logprobs is None:
            message = (
                "max_tokens is 0 without echo or prompt_logprobs, so the response would be empty. "
                'Try: "echo": true, or max_tokens of at least 1'
            )
            raise ApiError(400, message, param="max_tokens")
        if self.min_tokens:
            message = f"min_tokens is {self.min_tokens}, which is more than max_tokens, 0"
            raise ApiError(400, message, param="min_tokens")

    def params(
        self, suggested: dict[str, Any], max_new_tokens: int, constraint: Constraint | None
    ) -> SamplingParams:
        """Return the sampling parameters of the first of the ``n`` answers.

        Without an answer, one new token is sampled, because the engine computes the prompt only to
        sample a token. The response leaves the token out.
        """
        return super().params(suggested, max_new_tokens if self.has_answer else 1, constraint)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts of the request, each as a text or as token ids."""
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


class FunctionName(BodyPart):
    """Name of a function that the model can call."""

    name: str


class NamedFunction(BodyPart):
    """Choice of the function that the answer must call."""

    type: Literal["function"]
    function: FunctionName


class ChatBody(SampledBody):
    """Request body of ``/v1/chat/completions``."""

    attachment_form = CHAT_FORM
    messages: _Messages = Field(
        min_length=1, description="a list of messages with role and content"
    )
    max_completion_tokens: _Positive | None = Field(None, description="an integer of at least 1")
    logprobs: _Flag = False
    top_logprobs: _Likely = 0
    tools: _Tools = Field([], description="a list of functions with JSON schemas")
    tool_choice: Literal["auto", "none", "required"] | NamedFunction = Field(
        "auto",
        description="'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}",
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="an object")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="'none', 'minimal', 'low', 'medium', 'high' or 'xhigh'"
    )

    def check(self) -> None:
        """Raise ApiError if two fields of the request contradict each other."""
        super().check()
        check_tool_types(self.tools, ("function",))
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ApiError(
                400,
                "max_tokens and max_completion_tokens are both given. Try: leave max_tokens out",
                param="max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            message = 'top_logprobs is given without "logprobs": true'
            raise ApiError(400, message, param="top_logprobs")
        if self.offered and self.constraint is not None:
            raise ApiError(
                400,
                "A constrained answer cannot call the offered tools. "
                f"Try: tool_choice 'none', or leave {self.constraint_field} out",
                param=self.constraint_field,
            )
        if self.tool_choice == "required" and not self.tools:
            raise ApiError(400, "tool_choice is 'required' without tools", param="tool_choice")

    @property
    def num_likely(self) -> int:
        """Number of most likely tokens to report for each position of the answer."""
        return self.top_logprobs

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """Tools that the prompt offers to the model; None without tools."""
        return None if self.tool_choice == "none" or not self.tools else self.tools

    @property
    def required(self) -> list[dict[str, Any]] | None:
        """Tools of which the answer must call one; None if no call is required.

        Raises: ApiError: ``tool_choice`` names a function that is not among the tools.
        """
        if isinstance(self.tool_choice, str):
            return self.tools if self.tool_choice == "required" else None
        name = self.tool_choice.function.name
        functions = [tool.get("function") for tool in self.tools]
        tools_by_name = {
            function["name"]: tool
            for tool, function in zip(self.tools, functions, strict=True)
            if isinstance(function, dict) and isinstance(function.get("name"), str)
        }
        if name not in tools_by_name:
            names = list(tools_by_name)
            message = (
                f"tool_choice names the function {name!r:.100}; allowed is one of {shown(names)}"
            )
            raise ApiError(400, message, param="tool_choice")
        return [tools_by_name[name]]

    def params(
        self, suggested: dict[str, Any], max_new_tokens: int, constraint: Constraint | None
    ) -> SamplingParams:
        """Return the sampling parameters of the first of the ``n`` answers."""
        return super().params(suggested, self.max_completion_tokens or max_new_tokens, constraint)


class TokenizeBody(Body):
    """Request body of ``/tokenize``: a text, or the messages of a chat."""

    attachment_form = CHAT_FORM
    prompt: str | None = Field(None, description="a text")
    messages: _Messages | None = Field(None, description="a list of messages")
    tools: _Tools = Field([], description="a list of functions with JSON schemas")
    chat_template_kwargs: dict[str, Any] = Field({}, description="an object")
    # The pictures of a chat are encoded, and their vectors are cached.
    cache_salt: _CacheSalt = ""


class DetokenizeBody(Body):
    """Request body of ``/detokenize``: token ids."""

    tokens: _TokenIds = Field(description="a list of token ids")
