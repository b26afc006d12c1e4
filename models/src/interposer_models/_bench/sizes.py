"""The sizes of a benchmark, limited to the context of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from interposer.errors import ConfigError

CONTEXTS = (128, 1024, 4096)
RUNNING = 4
END_TOKENS = 20


@dataclass(frozen=True)
class Sizes:
    """Numbers of tokens and requests of the rows.

    Attributes:
        prompt: tokens of a prompt.
        behind: cached tokens before the prompt of the extension row; also the limit of a step.
        contexts: tokens before the decoded ones.
        new: decoded tokens.
        batch: requests that decode together.
        together: context of such requests: the shortest context, or less if the model's context
            would not hold the extra tokens of requests that started earlier.
        joins: prompts that join running requests, one in every 8 steps.
        shared: tokens of the prefix that prompts share; 0 omits the rows.
        notes: sentences about sizes that were reduced.
    """

    prompt: int
    behind: int
    contexts: tuple[int, ...]
    new: int
    batch: int
    together: int
    joins: int
    shared: int = 0
    notes: tuple[str, ...] = field(default=())

    @classmethod
    def within(
        cls,
        context: int,
        prompt: int,
        contexts: Sequence[int],
        new: int,
        batch: int,
        shared: int = 0,
    ) -> Sizes:
        """Choose sizes that fit a model with a context of ``context`` tokens.

        Raises: ConfigError: a size is below 1, or the context does not fit a prompt and a new
        token.
        """
        values_by_option = {"--prompt": prompt, "--new-tokens": new, "--batch": batch}
        values_by_option |= {"--contexts": min(contexts, default=0)}
        for name, value in values_by_option.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be an integer of at least 1")
        if shared < 0:
            raise ConfigError(f"--shared-prefix is {shared}, must be an integer of at least 0")
        if context < new + 16:
            raise ConfigError(
                f"--new-tokens is {new}, and the model's context is {context} tokens. "
                f"Try: --new-tokens {max(context // 4, 1)}"
            )
        notes: list[str] = []

        def cut(what: str, size: int, limit: int) -> int:
            if size > limit:
                notes.append(f"{what} is cut from {size} to {limit}: the context is {context}")
            return min(size, limit)

        max_context = context - new - 1
        prompt = cut("the prompt", prompt, max_context // 2)
        behind = cut("what a prompt extends", 2 * prompt, max_context - prompt)
        usable_contexts: dict[int, None] = {}
        for size in sorted(contexts):
            usable_contexts[cut("a context", size, max_context)] = None
        first = min(usable_contexts)
        # Tokens that the first request decodes while the prompts of the others are computed.
        margin_tokens = max(batch, RUNNING) * first // behind + 2
        together = max(min(first, max_context - margin_tokens), 1)
        if shared:
            shared = cut("the common prefix", shared, context - END_TOKENS - 2)
        # One prompt joins in every eighth step.
        joins = -(-new // 8)
        return cls(
            prompt,
            behind,
            tuple(usable_contexts),
            new,
            batch,
            together,
            joins,
            shared,
            tuple(notes),
        )

    @property
    def max_sequences(self) -> int:
        """Requests that run at once."""
        return max(self.batch, RUNNING + 1)

    def cache_tokens(self, page_tokens: int = 64) -> int:
        """Return the cache size that any row needs, with draft tokens and partial pages included.

        Args:
            page_tokens: margin of a sequence for partial pages and draft tokens.
        """
        longest = max(*self.contexts, self.behind + self.prompt, self.shared + END_TOKENS)
        rows = (
            longest + self.new,
            self.batch * (self.together + self.new),
            RUNNING * (self.together + self.new) + self.joins * (self.prompt + 1),
        )
        # The prefix cache keeps one round's shared prefix until the next round needs the pages.
        return max(rows) + self.shared + 2 * page_tokens * self.max_sequences


def parsed_contexts(text: str) -> list[int]:
    """Parse a comma-separated list of numbers.

    Raises: ConfigError: the text is no such list.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--contexts is {text!r}, must be numbers of tokens. Try: --contexts 128,1024"
        ) from None
