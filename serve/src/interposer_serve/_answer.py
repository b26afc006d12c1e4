"""The answers of one request: their tokens so far, and the parts that were read from the tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from interposer_engine import Delta, EmbeddedInput, Generation
from interposer_engine.answers import AnswerReader, ParsedAnswer, Part, ReasoningPart
from interposer_engine.parts import PromptTokens, num_tokens


@dataclass(slots=True)
class Answer:
    """One answer: its tokens, and the text, reasoning and tool calls that were read from them.

    Attributes:
        reader: Reads the parts of the answer from its tokens.
        deltas: Tokens so far.
        num_reasoning_tokens: Tokens so far that the model wrote to reason before its answer.
    """

    reader: AnswerReader
    deltas: list[Delta] = field(default_factory=list)
    num_reasoning_tokens: int = 0
    _is_reasoning: bool = False

    def push(self, delta: Delta) -> Sequence[Part]:
        """Add the next token, and return the parts that it completes."""
        self.deltas.append(delta)
        parts = self.reader.push(
            delta.token_id, delta.text, is_last=delta.finish_reason is not None
        )
        if parts:
            self._is_reasoning = isinstance(parts[-1], ReasoningPart)
        self.num_reasoning_tokens += self._is_reasoning
        return parts

    @property
    def newest(self) -> Delta:
        """The latest token."""
        return self.deltas[-1]

    @property
    def index(self) -> int:
        """Index of the answer among the answers of the request."""
        return self.deltas[-1].index

    @property
    def text(self) -> str:
        """Text of all tokens, with reasoning and tool calls as the model wrote them."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended; "tool_calls" if the model waits for the result of a call."""
        reason = self.newest.finish_reason
        return "tool_calls" if reason == "stop" and self.parsed.calls else reason

    @property
    def parsed(self) -> ParsedAnswer:
        """Text, reasoning and tool calls of the complete answer."""
        return self.reader.answer


@dataclass(frozen=True, slots=True)
class Usage:
    """Numbers of tokens of a request.

    Attributes:
        num_prompt_tokens: Tokens of all prompts.
        num_new_tokens: Tokens of all answers.
        num_cached_tokens: Tokens of prompts that were in the prefix cache.
        num_reasoning_tokens: Tokens of all answers that are reasoning.
        num_media_tokens: Tokens of all prompts that are pictures or sounds, by kind.
    """

    num_prompt_tokens: int
    num_new_tokens: int = 0
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_media_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def media_details(self) -> dict[str, int]:
        """Fields of OpenAI's APIs for the tokens of pictures and sounds; none without them."""
        return {f"{kind}_tokens": count for kind, count in self.num_media_tokens.items()}

    @classmethod
    def of(cls, generation: Generation, answers: Sequence[Answer]) -> Usage:
        """Count the tokens of a generation that has ended."""
        # Several answers to a prompt compute the prompt once.
        sequences = [stream.sequence for stream in generation.answers[:: generation.n]]
        # Only transcripts have prompts of features, and those have no generation.
        prompts = [cast(PromptTokens, prompt) for prompt, _ in generation.prompts]
        media = Counter[str]()
        for part in (part for prompt in prompts for part in prompt):
            if isinstance(part, EmbeddedInput):
                media[part.kind] += len(part)
        return cls(
            sum(map(num_tokens, prompts)),
            sum(len(answer.deltas) for answer in answers),
            # After a preemption, the prefix cache may hold the start of the answer, too.
            sum(min(sequence.num_shared, len(sequence.prompt)) for sequence in sequences),
            sum(answer.num_reasoning_tokens for answer in answers),
            media,
        )
