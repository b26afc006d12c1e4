"""The sizes of a benchmark, cut to the context of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from interposer.errors import ConfigError

CONTEXTS = (128, 1024, 4096)
RUNNING = 4
END_TOKENS = 20


@dataclass(frozen=True)
class Sizes:
    """Tokens and requests of the rows.

    Attributes:
        prompt: tokens of a prompt.
        behind: tokens in the cache before the prompt that extends them; a step takes as many.
        contexts: tokens before those that are decoded.
        new: tokens that are decoded.
        batch: requests that decode together.
        together: tokens before those of such requests, as many as in the shortest context where
            the model's holds them though some are ahead of others.
        joins: prompts that join running requests, one in every 8 steps.
        shared: tokens that prompts have in common; 0 leaves that row out.
        notes: what was cut.
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
        """Return sizes that a model with a context of so many tokens takes.

        Raises: ConfigError: a size is below 1, or the context holds no prompt and a new token.
        """
        given = {"--prompt": prompt, "--new-tokens": new, "--batch": batch}
        given |= {"--contexts": min(contexts, default=0)}
        for name, value in given.items():
            if value < 1:
                raise ConfigError(f"{name} is {value}, must be an integer of at least 1")
        if shared < 0:
            raise ConfigError(f"--shared-prefix is {shared}, must be an integer of at least 1")
        if context < new + 16:
            raise ConfigError(
                f"--new-tokens is {new}, and the model's context is {context} tokens. "
                f"Try: --new-tokens {max(context // 4, 1)}"
            )
        notes: list[str] = []

        def cut(what: str, wanted: int, most: int) -> int:
            if wanted > most:
                notes.append(f"{what} is cut from {wanted} to {most}: the context is {context}")
            return min(wanted, most)

        room = context - new - 1
        prompt = cut("the prompt", prompt, room // 2)
        behind = cut("what a prompt extends", 2 * prompt, room - prompt)
        kept: dict[int, None] = {}
        for wanted in sorted(contexts):
            kept[cut("a context", wanted, room)] = None
        first = min(kept)
        ahead = max(batch, RUNNING) * first // behind + 2
        together = max(min(first, room - ahead), 1)
        if shared:
            shared = cut("the common prefix", shared, context - END_TOKENS - 2)
        joins = -(-new // 8)
        return cls(prompt, behind, tuple(kept), new, batch, together, joins, shared, tuple(notes))

    @property
    def max_sequences(self) -> int:
        """The requests that run at once."""
        return max(self.batch, RUNNING + 1)

    def cache_tokens(self, page_tokens: int = 64) -> int:
        """Return the tokens of a cache that holds what any row takes, guesses and pages included.

        Args:
            page_tokens: that a sequence may waste; guesses take some, too.
        """
        longest = max(*self.contexts, self.behind + self.prompt, self.shared + END_TOKENS)
        rows = (
            longest + self.new,
            self.batch * (self.together + self.new),
            RUNNING * (self.together + self.new) + self.joins * (self.prompt + 1),
        )
        # A prefix cache keeps what one round computed until the next one wants the room.
        return max(rows) + self.shared + 2 * page_tokens * self.max_sequences


def parsed_contexts(text: str) -> list[int]:
    """Return the numbers of a list with commas.

    Raises: ConfigError: it is no such list.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--contexts is {text!r}, must be numbers of tokens. Try: --contexts 128,1024"
        ) from None
