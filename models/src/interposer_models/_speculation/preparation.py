"""From the settings of speculation to a model with guesses, step by step as the model loads."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

from interposer import Site
from interposer_models._engine.engine import Engine
from interposer_models._speculation.balance import Balance
from interposer_models._speculation.draft_checks import check_sources, check_vocabulary
from interposer_models._speculation.draft_model import ModelProposer
from interposer_models._speculation.draft_sampling import DraftSampling
from interposer_models._speculation.eagle3_checkpoint import separate_head
from interposer_models._speculation.head_guesses import stored_head
from interposer_models._speculation.kept_states import KeptStates
from interposer_models._speculation.ngram import NgramProposer
from interposer_models._speculation.proposer import Proposer
from interposer_models._speculation.settings import HEADS, NGRAM, Speculation
from interposer_models._speculation.speculator import Speculator, repeats
from interposer_models._speculation.target import Target


class Guesses(Protocol):
    """One way to guess, whose memory is taken; its text is for people.

    Attributes:
        certain: there are no distributions of guesses.
    """

    certain: bool

    def proposer(self, engine: Engine, sampling: DraftSampling, num_drafts: int) -> Proposer:
        """Return what guesses for the sequences of an engine."""
        ...


class NgramGuesses:
    """Prompt lookup."""

    certain = True

    def __str__(self) -> str:
        return "prompt lookup"

    def proposer(self, engine: Engine, sampling: DraftSampling, num_drafts: int) -> Proposer:
        """Return what looks up; see ``Guesses``."""
        return NgramProposer()


class ModelGuesses:
    """A draft model.

    Raises:
        ConfigError: it has another vocabulary than the target, or one of both has an encoder.
        InterposerError: it cannot be loaded.
    """

    certain = False

    def __init__(self, settings: Speculation, target: Target) -> None:
        path, model = target.planned.path, target.planned.model
        check_sources(path, model)
        draft = settings.draft
        if isinstance(draft, str | Path):
            tokens = settings.cache_tokens or target.default_tokens
            draft = target.load(draft, cache_tokens=tokens)
        check_sources(draft.path, draft.engine.model)
        check_vocabulary(path, model.config.vocab_size, target.tokenizer, draft)
        self._draft = draft
        self._kept = kept_states(draft.engine.model, target.max_sequences, draft.engine.device)

    def __str__(self) -> str:
        return f"draft model {self._draft.path}"

    def proposer(self, engine: Engine, sampling: DraftSampling, num_drafts: int) -> Proposer:
        """Return what lets the draft follow; see ``Guesses``."""
        size, draws = engine.model.config.vocab_size, partial(repeats, engine)
        facts = size, engine.device, num_drafts, draws, self._kept
        return ModelProposer(self._draft.engine, sampling, *facts)


class Preparation:
    """The guesses for a model, whose memory is taken before that of its cache is settled."""

    def __init__(self, settings: Speculation, target: Target) -> None:
        """Load what is needed.

        Raises: InterposerError: see ``ModelGuesses``.
        """
        self._settings = settings
        self._guesses: Guesses
        if settings.draft == NGRAM:
            self._guesses = NgramGuesses()
        elif settings.draft == HEADS:
            self._guesses = stored_head(settings, target)
        elif isinstance(settings.draft, str | Path):
            head = separate_head(settings.draft, settings, target)
            self._guesses = head or ModelGuesses(settings, target)
        else:
            self._guesses = ModelGuesses(settings, target)
        planned = target.planned
        device = planned.placement.device.torch_device
        self._kept = kept_states(planned.model, target.max_sequences, device)

    def start(self, engine: Engine, site: Site) -> None:
        """Let an engine verify guesses from now on.

        Args:
            site: of its sampler.
        """
        settings, guesses = self._settings, self._guesses
        size, count = engine.model.config.vocab_size, settings.tokens
        sampling = DraftSampling(site, size, count, certain=guesses.certain)
        proposer = guesses.proposer(engine, sampling, count)
        balance = Balance(engine.agreed) if settings.adaptive else None
        engine.speculation = Speculator(engine, proposer, sampling, count, balance, self._kept)
        site.resolver.notes.append(f"speculation: up to {count} tokens by {guesses}")


def kept_states(model: object, max_sequences: int, device: str) -> KeptStates | None:
    """Return the memory for states before guesses; None where a model has none."""
    layers = getattr(model, "state_layers", ())
    return KeptStates(layers, max_sequences, device) if len(layers) else None
