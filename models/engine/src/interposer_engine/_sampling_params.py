"""Sampling parameters and stop conditions of one request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from interposer.errors import RequestError, UnknownNameError
from interposer_engine._sampling_fields import (
    CommandField,
    Draw,
    LogitEdit,
    Penalty,
    RequestField,
    Suggested,
)
from interposer_engine._speech.rules import TranscriptRules
from interposer_ops.layers import MOST_LIKELY

Kind = Literal["JSON schema", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True)
class Constraint:
    """A formal language to which the generated text of a request is restricted.

    Create a constraint with one of the class methods. The model checks the constraint when it
    compiles the constraint for a request.

    Attributes:
        kind: Kind of language.
        text: A JSON schema, a pattern, a JSON list of texts, or a grammar.
    """

    kind: Kind
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Constraint:
        """Create a constraint that allows JSON that matches a schema.

        Between two parts of the JSON there may be nothing, a space, or a newline with up to 24
        characters of indentation. The field ``"x-guidance": {"whitespace_flexible": false}`` of the
        schema allows nothing.

        Args:
            schema: An object, or its text. Unsupported keywords are refused later.
        Raises: RequestError: the schema is not a JSON object.
        """
        try:
            # Normalize the schema to text, so that equal constraints share a cache entry.
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(parsed, Mapping):
                raise RequestError(
                    f"schema is {schema!r:.200}, must be a JSON object. Try: {{'type': 'object'}}"
                )
            return cls("JSON schema", json.dumps(parsed, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"schema is {schema!r:.200}, which is no JSON: {error}") from None

    @classmethod
    def json_object(cls) -> Constraint:
        """Create a constraint that allows any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Constraint:
        """Create a constraint that allows texts a regular expression matches completely.

        The syntax is that of Rust's crate regex, without look-around and back references.

        Raises: RequestError: the pattern is not a text, or is empty.
        """
        return cls("regex", _text("pattern", pattern, r"'[0-9]+'"))

    @classmethod
    def choice(cls, texts: Iterable[str]) -> Constraint:
        """Create a constraint that allows exactly one of several texts.

        Raises: RequestError: there is no text, or a text is empty or has another type.
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise RequestError(f"choice is {texts!r:.200}, must be a list. Try: ['yes', 'no']")
        checked_texts = [_text("choice", text, "['yes', 'no']") for text in texts]
        if not checked_texts:
            raise RequestError("choice is empty. Try: ['yes', 'no']")
        return cls("choice", json.dumps(checked_texts, ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> Constraint:
        """Create a constraint that allows the texts of a context-free grammar.

        Args:
            text: Lark syntax with the rule ``start``, or GBNF with the rule ``root``. A text with
                ``::=`` is GBNF.
        Raises: RequestError: the grammar is not a text, or is empty.
        """
        return cls("grammar", _text("grammar", text, """'start: "yes" | "no"'"""))


def _text(name: str, text: object, example: str) -> str:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{name} holds {text!r:.200}, must be a text. Try: {example}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{name} has {text[error.start]!r} at {error.start}, which is no character"
        ) from None
    return text


# Parameters of other interfaces, and arguments that belong elsewhere, with their replacements.
_ELSEWHERE = {
    "best_of": "generate(..., n=4), and choose among the answers by their logprobs",
    "echo": "prompt_token_ids of the completion",
    "logprobs": "top_logprobs; the token's own is always reported",
    "max_tokens": "max_new_tokens",
    "n": "n of generate() or stream(), beside params",
}
_INT64_MAX = 2**63 - 1  # the ops take seeds and top_k as int64

# Error texts quote the descriptions.
_Fraction = Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1")]
_MinusTwoToTwo = Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2")]
_Text = Annotated[str, Field(min_length=1)]
# Clients of vLLM write -1 for all tokens.
_TopK = Annotated[int, Field(ge=-1, le=_INT64_MAX), AfterValidator(lambda top_k: max(top_k, 0))]
_TokenId = Annotated[int, Field(ge=0, le=_INT64_MAX)]


class _Bias(dict[int, float]):
    """Hashable mapping from token id to logit bias, so that parameters can be dictionary keys."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


_NumTokens = Annotated[int, Field(ge=0, le=MOST_LIKELY)]


class SamplingParams(BaseModel):
    """Sampling parameters of one request; the defaults decode greedily.

    Attributes:
        max_new_tokens: Number of new tokens after which the request ends.
        temperature: Divisor of the logits; 0 is greedy.
        top_k: Number of likeliest tokens to draw from; 0 or -1 for all.
        top_p: Draw from the likeliest tokens that together have this probability; 1 for all.
        min_p: Draw from tokens that are at least this fraction as likely as the likeliest; 0 for
            all.
        repetition_penalty: A value above 1 makes the tokens of prompt and output less likely.
        presence_penalty: Number to subtract once from the logit of each generated token.
        frequency_penalty: Number to subtract from a token's logit for each time that the token was
            generated.
        seed: The same seed gives the same tokens, independent of other requests; by default, a
            random seed.
        stop: Texts that end the request and are not part of the returned text.
        stop_token_ids: Tokens that end the request.
        ignore_eos: Whether to continue after the model's own end tokens.
        min_tokens: Number of new tokens before which no end token can come. A text of ``stop`` can.
        logit_bias: Numbers to add to the logits of tokens, before penalties, by token id.
        constraint: The form of the text. End tokens can come only where the text is complete, and
            the request ends if nothing can follow.
        transcript: The tokens that may follow each other in a transcript of speech;
            ``LanguageModel.transcribe`` sets this field. None for other texts.
        top_logprobs: Number of likeliest tokens to report at each position.
        prompt_logprobs: Report the log probability of each prompt token but the first, and this
            number of likeliest tokens at the position; None reports nothing. The values are the
            model's own, before penalties, biases and constraints.
        adapter: Name of a loaded adapter; see ``LanguageModel.load_adapter``. None for the plain
            model.
        cache_salt: Only requests with the same salt share cached prefixes and vectors of media. The
            time to the first token reveals whether they are cached, so clients that must not learn
            of each other's prompts need different salts.
    Raises:
        RequestError: a value has the wrong type, is out of range, or contradicts another.
        UnknownNameError: there is no field of that name.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_new_tokens: int = Field(default=16, ge=1, description="an integer of at least 1")
    temperature: Annotated[
        float, Draw("apply_temperature"), Suggested(), RequestField(), CommandField()
    ] = Field(default=0.0, ge=0, le=1000, description="a number from 0, which is greedy, to 1000")
    top_k: Annotated[
        _TopK,
        Draw("mask_top_k_top_p"),
        Suggested(),
        RequestField(),
        CommandField(),
    ] = Field(default=0, description="0 or -1, which keep all tokens, or a positive integer")
    top_p: Annotated[
        _Fraction, Draw("mask_top_k_top_p"), Suggested(), RequestField(), CommandField()
    ] = 1.0
    min_p: Annotated[_Fraction, Draw("mask_min_p"), Suggested(), RequestField(), CommandField()] = (
        0.0
    )
    repetition_penalty: Annotated[
        float, Penalty("repetition"), Suggested(for_greedy=True), RequestField(), CommandField()
    ] = Field(default=1.0, ge=0.001, le=1000, description="a number from 0.001 to 1000")
    presence_penalty: Annotated[
        _MinusTwoToTwo, Penalty("presence"), RequestField(), CommandField()
    ] = 0.0
    frequency_penalty: Annotated[
        _MinusTwoToTwo, Penalty("frequency"), RequestField(), CommandField()
    ] = 0.0
    seed: Annotated[int | None, RequestField("an integer from 0 to 2^63 - 1"), CommandField()] = (
        Field(
            default=None, ge=0, le=_INT64_MAX, description="None or an integer from 0 to 2^63 - 1"
        )
    )
    stop: Annotated[tuple[_Text, ...], RequestField(), CommandField()] = Field(
        default=(), strict=False, description="a list or tuple of texts that are not empty"
    )
    stop_token_ids: Annotated[tuple[_TokenId, ...], RequestField()] = Field(
        default=(), strict=False, description="a list or tuple of integers of at least 0"
    )
    ignore_eos: Annotated[bool, RequestField("true or false")] = Field(
        default=False, description="True or False"
    )
    min_tokens: Annotated[int, LogitEdit(), RequestField("an integer of at least 0")] = Field(
        default=0, ge=0, le=_INT64_MAX, description="an integer from 0 to max_new_tokens"
    )
    logit_bias: Annotated[
        Mapping[_TokenId, Annotated[float, Field(ge=-100, le=100)]],
        AfterValidator(_Bias),
        LogitEdit(),
        RequestField(),
    ] = Field(default=_Bias(), description="token ids with numbers from -100 to 100")
    constraint: Annotated[Constraint | None, LogitEdit()] = Field(
        default=None, description="None or a Constraint, such as Constraint.regex('[0-9]+')"
    )
    transcript: Annotated[TranscriptRules | None, LogitEdit()] = Field(
        default=None, description="None or TranscriptRules"
    )
    top_logprobs: _NumTokens = Field(default=0, description=f"an integer from 0 to {MOST_LIKELY}")
    prompt_logprobs: Annotated[
        _NumTokens | None, RequestField(f"an integer from 0 to {MOST_LIKELY}")
    ] = Field(default=None, description=f"None or an integer from 0 to {MOST_LIKELY}")
    adapter: str | None = Field(default=None, description="None or the name of a loaded adapter")
    cache_salt: str = Field(default="", description="a text")

    @cached_property
    def takes_likeliest(self) -> bool:
        """Whether each token is the argmax of the model's logits, with nothing else reported."""
        return self.temperature == 0 and self.takes_logits_alone

    @cached_property
    def takes_logits_alone(self) -> bool:
        """Whether tokens depend only on the model's own logits, with nothing else reported."""
        return not (self.is_penalised or self.edits_logits or self.top_logprobs)

    @cached_property
    def is_penalised(self) -> bool:
        """Whether the request penalizes tokens that were used before."""
        return any(map(self.is_changed, marked_fields(Penalty)))

    @cached_property
    def edits_logits(self) -> bool:
        """Whether the request excludes or biases some tokens."""
        return any(map(self.is_changed, marked_fields(LogitEdit)))

    def is_changed(self, name: str) -> bool:
        """Return whether the field ``name`` differs from its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    def numbered(self, count: int, shares: bool) -> list[SamplingParams]:
        """Return the sampling parameters for each of ``count`` answers to one prompt.

        Seeds are consecutive; 0 follows 2^63 - 1.

        Args:
            shares: Whether only the first answer computes the log probabilities of the prompt.
        """
        prompt_logprobs = None if shares else self.prompt_logprobs
        numbered = [self]
        for index in range(1, count):
            seed = None if self.seed is None else (self.seed + index) % (_INT64_MAX + 1)
            numbered.append(
                self.model_copy(update={"seed": seed, "prompt_logprobs": prompt_logprobs})
            )
        return numbered

    @classmethod
    def request_fields(cls) -> dict[str, tuple[Any, Any]]:
        """Return types and pydantic fields of the parameters that HTTP request bodies share.

        A request that leaves a parameter out has the default; None if a checkpoint may suggest the
        value.
        """
        types = get_type_hints(cls, include_extras=True)
        fields: dict[str, tuple[Any, Any]] = {}
        for name, marker in marked_fields(RequestField).items():
            field, kind, default = cls.model_fields[name], types[name], None
            if name in marked_fields(Suggested):
                kind |= None
            else:
                default = field.default
            fields[name] = (
                Annotated[kind, *field.metadata],
                Field(default, description=marker.description or field.description),
            )
        return fields

    if not TYPE_CHECKING:  # type checkers derive the signature from the fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise _refusal(error, fields) from None
            if self.min_tokens > self.max_new_tokens:
                raise RequestError(
                    f"min_tokens is {self.min_tokens}, which is more than max_new_tokens, "
                    f"{self.max_new_tokens}"
                )
            if self.min_tokens and self.constraint is not None:
                raise RequestError(
                    "min_tokens and constraint are both given, and a constraint says itself how "
                    "long a text can be. Try: leave min_tokens out"
                )


_Marker = TypeVar("_Marker")


@cache
def marked_fields(kind: type[_Marker]) -> Mapping[str, _Marker]:
    """Return the markers of one kind by the name of the marked parameter, in field order."""
    return {
        name: marker
        for name, field in SamplingParams.model_fields.items()
        for marker in field.metadata
        if isinstance(marker, kind)
    }


def _refusal(error: ValidationError, fields: dict[str, Any]) -> RequestError | UnknownNameError:
    fields_by_name = SamplingParams.model_fields
    for name in fields:
        if name not in fields_by_name:
            hint = f"Try: {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            return UnknownNameError("sampling parameter", name, fields_by_name, hint)
    name = str(error.errors()[0]["loc"][0])
    return RequestError(
        f"{name} is {fields[name]!r}; allowed is {fields_by_name[name].description}"
    )
