"""The settings of speculative decoding, and the parts that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interposer import CausalModel, Site
from interposer.errors import ConfigError
from interposer_models._engine.engine import Engine
from interposer_models._engine.sources import reads_sources
from interposer_models._speculation.balance import Balance
from interposer_models._speculation.draft_model import ModelProposer
from interposer_models._speculation.draft_sampling import DraftSampling
from interposer_models._speculation.ngram import NgramProposer
from interposer_models._speculation.proposer import Proposer
from interposer_models._speculation.speculator import Speculator, repeats
from interposer_models._tokenizer import TextTokenizer

if TYPE_CHECKING:
    from interposer_models._language_model import LanguageModel

_NGRAM = "ngram"
_MOST_TOKENS = 64
_CACHE_TOKENS = 32768


@dataclass(frozen=True)
class Speculation:
    """The choice of what guesses the next tokens, of which the model verifies several in a step.

    Attributes:
        draft: ``"ngram"``, which looks up what followed the newest tokens before, or a smaller
            model with the same tokenizer: what ``load`` takes, or what it returned. Its cache is
            for guesses then, and no other request should run in it.
        tokens: that are guessed for a sequence at most.
        cache_tokens: that the cache of a draft model holds that is loaded here; None takes what
            full contexts of all sequences need, and 32768 at most.
        adaptive: guesses pause while they cost more time than they save.
    Raises: ConfigError: ``tokens`` is no integer from 1 to 64, or ``draft`` is something else.
    """

    draft: str | Path | LanguageModel = _NGRAM
    tokens: int = 4
    cache_tokens: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        count = self.tokens
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= _MOST_TOKENS:
            raise ConfigError(
                f"tokens of Speculation is {count!r}, must be an integer from 1 to {_MOST_TOKENS}"
            )
        if not (isinstance(self.draft, str | Path) or hasattr(self.draft, "engine")):
            raise ConfigError(
                f"draft of Speculation is {self.draft!r}, must be 'ngram', a path or a "
                "LanguageModel"
            )

    @classmethod
    def of(cls, given: str | Path | Speculation) -> Speculation:
        """Return the settings that ``load`` was given.

        Raises: ConfigError: they are of another type.
        """
        if isinstance(given, Speculation):
            return given
        if not isinstance(given, str | Path):
            raise ConfigError(
                f"speculation is of the type {type(given).__name__}. Try: 'ngram', the path of a "
                "draft model, or Speculation(...)"
            )
        return cls(given)

    def __str__(self) -> str:
        by = "prompt lookup" if self.draft == _NGRAM else f"draft model {_path(self.draft)}"
        return f"speculation: up to {self.tokens} tokens by {by}"

    def draft_model(
        self,
        path: Path,
        model: CausalModel,
        tokenizer: TextTokenizer,
        max_sequences: int,
        load: Callable[..., LanguageModel],
    ) -> LanguageModel | None:
        """Return the draft model for a model, loaded if need be; None where there is none.

        Args:
            path: of the model, for the text of errors.
        Raises:
            ConfigError: the model or its draft has recurrent layers, or, with a draft model, an
                encoder; or they have different vocabularies.
            InterposerError: the draft cannot be loaded.
        """
        _check_states(path, model)
        if self.draft == _NGRAM:
            return None
        _check_sources(path, model)
        draft: Any = self.draft
        if isinstance(draft, str | Path):
            most = max_sequences * model.config.max_position_embeddings
            draft = load(draft, cache_tokens=self.cache_tokens or min(most, _CACHE_TOKENS))
        _check_states(draft.path, draft.engine.model)
        _check_sources(draft.path, draft.engine.model)
        _check_vocabulary(path, model.config.vocab_size, tokenizer, draft)
        found: LanguageModel = draft
        return found

    def start(self, engine: Engine, site: Site, draft: LanguageModel | None) -> None:
        """Let an engine verify guesses from now on.

        Args:
            site: of its sampler.
            draft: of ``draft_model``.
        """
        size = engine.model.config.vocab_size
        sampling = DraftSampling(site, size, self.tokens, certain=draft is None)
        proposer: Proposer = NgramProposer()
        if draft is not None:
            proposer = ModelProposer(
                draft.engine, sampling, size, engine.device, self.tokens, partial(repeats, engine)
            )
        balance = Balance() if self.adaptive else None
        engine.speculation = Speculator(engine, proposer, sampling, self.tokens, balance)
        site.resolver.notes.append(str(self))


def _path(draft: str | Path | LanguageModel) -> str:
    return str(draft if isinstance(draft, str | Path) else draft.path)


def _check_states(path: Path, model: Any) -> None:
    if len(getattr(model, "state_layers", ())):
        raise ConfigError(
            f"{path} has recurrent layers, whose states hold every token that they were given, so "
            "that no guess can be taken back. Try: load it without speculation, or another draft"
        )


def _check_sources(path: Path, model: Any) -> None:
    if reads_sources(model):
        raise ConfigError(
            f"{path} has an encoder, and a draft model is given no source to read. "
            "Try: speculation='ngram', which looks up the decoder's own tokens"
        )


def _check_vocabulary(
    path: Path, vocab_size: int, tokenizer: TextTokenizer, draft: LanguageModel
) -> None:
    own, other = tokenizer.vocabulary, draft.tokenizer.vocabulary
    if own and other:
        differing = own.items() ^ other.items()
        same, told = not differing, f"{len({text for text, _ in differing})} tokens differ"
    else:
        size = draft.engine.model.config.vocab_size
        same, told = size == vocab_size, f"{size} and {vocab_size} tokens"
    if not same:
        raise ConfigError(
            f"The draft model {draft.path} has another vocabulary than {path}: {told}. "
            "Try: a draft of the same family, or speculation='ngram'"
        )
