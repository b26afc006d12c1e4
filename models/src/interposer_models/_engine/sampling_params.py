"""Sampling parameters and stop conditions of one request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from interposer.errors import RequestError, UnknownNameError
from interposer_models._constraint import Constraint
from interposer_ops.layers.logit_edits import MOST_LIKELY

# Names of other interfaces, and of arguments that are no parameters of one answer.
_ELSEWHERE = {
    "best_of": "generate(..., n=4), and choose among the answers by their logprobs",
    "echo": "prompt_token_ids of the completion",
    "logprobs": "top_logprobs; the token's own is always told",
    "max_tokens": "max_new_tokens",
    "n": "n of generate() or stream(), beside params",
}
_INT64_MAX = 2**63 - 1  # the ops take seeds and top_k as int64

# Each description says in an error what is allowed.
_Fraction = Annotated[float, Field(ge=0, le=1, description="a number from 0 to 1")]
_Penalty = Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2")]
_Text = Annotated[str, Field(min_length=1)]
_TokenId = Annotated[int, Field(ge=0, le=_INT64_MAX)]


class _Bias(dict[int, float]):
    """A mapping that parameters can be keys with."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


_Count = Annotated[int, Field(ge=0, le=MOST_LIKELY)]


class SamplingParams(BaseModel):
    """Parameters of one request; the defaults choose the likeliest token each time.

    Attributes:
        max_new_tokens: the request ends after that many.
        temperature: divides the logits; 0 is greedy.
        top_k: only so many of the likeliest tokens are left; 0 leaves all.
        top_p: the likeliest tokens are left that hold this probability together; 1 leaves all.
        min_p: tokens are left that are at least this fraction as likely as the likeliest; 0
            leaves all.
        repetition_penalty: above 1 discourages tokens of prompt and output.
        presence_penalty: subtracted from the logits of tokens that were generated.
        frequency_penalty: subtracted once for each time that a token was generated.
        seed: the same seed gives the same tokens, whatever runs beside; None draws one.
        stop: texts that end the request and are left out of its text.
        stop_token_ids: tokens that end the request.
        ignore_eos: the model's own end tokens don't end the request.
        min_tokens: tokens that end the request cannot come before so many others did. A text of
            ``stop`` can.
        logit_bias: from token ids to what is added to their logits, before penalties.
        constraint: the form of the text. Tokens that end the request can come where the text is
            complete, and it ends by itself where nothing else can follow.
        top_logprobs: how many of the likeliest tokens are told at each position.
        prompt_logprobs: the log probability of each token of the prompt but the first is told, with
            as many of the likeliest tokens in its place; None tells none. They are those of the
            model, whatever else is asked for.
        adapter: the name of a loaded adapter, see ``LanguageModel.load_adapter``; None is the model
            as it is.
        cache_salt: only requests of the same salt share what is computed of prompts that begin
            alike. How soon a first token comes tells whoever asks which beginnings are kept, so
            that clients who must not learn of each other need different ones.
    Raises:
        RequestError: a value has the wrong type or is out of range, or contradicts another.
        UnknownNameError: a field of that name does not exist.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_new_tokens: int = Field(default=16, ge=1, description="an integer of at least 1")
    temperature: float = Field(
        default=0.0, ge=0, le=1000, description="a number from 0, which is greedy, to 1000"
    )
    top_k: int = Field(
        default=0,
        ge=0,
        le=_INT64_MAX,
        description="0, which keeps all tokens, or a positive integer",
    )
    top_p: _Fraction = 1.0
    min_p: _Fraction = 0.0
    repetition_penalty: float = Field(
        default=1.0, ge=0.001, le=1000, description="a number from 0.001 to 1000"
    )
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    seed: int | None = Field(
        default=None, ge=0, le=_INT64_MAX, description="None or an integer from 0 to 2^63 - 1"
    )
    stop: tuple[_Text, ...] = Field(
        default=(), strict=False, description="a list or tuple of texts that are not empty"
    )
    stop_token_ids: tuple[_TokenId, ...] = Field(
        default=(), strict=False, description="a list or tuple of integers of at least 0"
    )
    ignore_eos: bool = Field(default=False, description="True or False")
    min_tokens: int = Field(default=0, ge=0, description="an integer from 0 to max_new_tokens")
    logit_bias: Annotated[
        Mapping[_TokenId, Annotated[float, Field(ge=-100, le=100)]], AfterValidator(_Bias)
    ] = Field(default=_Bias(), description="token ids with numbers from -100 to 100")
    constraint: Constraint | None = Field(
        default=None, description="None or a Constraint, such as Constraint.regex('[0-9]+')"
    )
    top_logprobs: _Count = Field(default=0, description=f"an integer from 0 to {MOST_LIKELY}")
    prompt_logprobs: _Count | None = Field(
        default=None, description=f"None or an integer from 0 to {MOST_LIKELY}"
    )
    adapter: str | None = Field(default=None, description="None or the name of a loaded adapter")
    cache_salt: str = Field(default="", description="a text")

    @cached_property
    def takes_likeliest(self) -> bool:
        """True if each token is the one of the model's largest logit, and nothing else is told."""
        return self.temperature == 0 and self.takes_logits_alone

    @cached_property
    def takes_logits_alone(self) -> bool:
        """True if tokens depend on the model's logits alone, and nothing else is told of them."""
        return not (self.is_penalised or self.edits_logits or self.top_logprobs)

    @cached_property
    def is_penalised(self) -> bool:
        """True if tokens that were used are less likely, or likelier, than the logits say."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)

    @cached_property
    def edits_logits(self) -> bool:
        """True if tokens are ruled out or favoured."""
        return bool(self.min_tokens or self.logit_bias or self.constraint)

    def numbered(self, count: int, shares: bool) -> list[SamplingParams]:
        """Return the parameters of each of so many answers to one prompt.

        Seeds follow each other, and 0 follows 2^63 - 1.

        Args:
            shares: the first answer alone tells the log probabilities of the prompt.
        """
        told = None if shares else self.prompt_logprobs
        numbered = [self]
        for index in range(1, count):
            seed = None if self.seed is None else (self.seed + index) % (_INT64_MAX + 1)
            numbered.append(self.model_copy(update={"seed": seed, "prompt_logprobs": told}))
        return numbered

    if not TYPE_CHECKING:  # type checkers derive the signature from the fields

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise _reason(error, fields) from None
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


def _reason(error: ValidationError, fields: dict[str, Any]) -> RequestError | UnknownNameError:
    known = SamplingParams.model_fields
    for name in fields:
        if name not in known:
            hint = f"Try: {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
            return UnknownNameError("sampling parameter", name, known, hint)
    name = str(error.errors()[0]["loc"][0])
    return RequestError(f"{name} is {fields[name]!r}; allowed is {known[name].description}")
