"""Setup of speculative decoding while a target model loads."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from interposer import Site
from interposer_engine._engine import Engine
from interposer_engine._speculation.eagle3 import load_eagle3_head
from interposer_engine._speculation.mtp import load_checkpoint_head
from interposer_engine._speculation.proposers import (
    DraftSampling,
    ModelProposer,
    NgramProposer,
    Proposer,
    SavedStates,
)
from interposer_engine._speculation.settings import (
    HEADS,
    NGRAM,
    Speculation,
    Target,
    check_sources,
    check_vocabulary,
)
from interposer_engine._speculation.speculator import DraftCostModel, Speculator, is_reproducible


class DraftSource(Protocol):
    """Interface of methods that draft tokens, with allocated memory; ``str`` names the method.

    Attributes:
        certain: Whether the proposer has no distributions of draft tokens.
        notes: Remarks on its weights, for ``explain``.
    """

    certain: bool
    notes: Sequence[str]

    def proposer(self, engine: Engine, sampling: DraftSampling, num_drafts: int) -> Proposer:
        """Create the object that proposes draft tokens for an engine's sequences."""
        ...


class NgramDraftSource:
    """Draft source for prompt lookup, which needs no model or memory."""

    certain = True
    notes: Sequence[str] = ()

    def __str__(self) -> str:
        return "prompt lookup"

    def proposer(self, engine: Engine, sampling: DraftSampling, num_drafts: int) -> Proposer:
        """Create a proposer that looks up draft tokens in the prompt and output."""
        return NgramProposer()


class ModelDraftSource:
    """Draft source that runs a separate, smaller draft model.

    Raises:
        ConfigError: the vocabularies of draft and target differ, or one of both has an encoder.
        InterposerError: the draft model cannot be loaded.
    """

    certain = False
    notes: Sequence[str] = ()

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
        self._saved = allocate_saved_states(
            draft.engine.model, target.max_sequences, draft.engine.device
        )

    def __str__(self) -> str:
        return f"draft model {self._draft.path}"

    def proposer(self, engine: Engine, sampling: DraftSampling, num_drafts: int) -> Proposer:
        """Create a proposer that runs the draft model; see ``DraftSource``."""
        return ModelProposer(
            self._draft.engine,
            sampling,
            engine.model.config.vocab_size,
            engine.device,
            num_drafts,
            partial(is_reproducible, engine),
            self._saved,
        )


class SpeculationSetup:
    """Draft source of a target model, allocated before the target's own KV cache is sized."""

    def __init__(self, settings: Speculation, target: Target) -> None:
        """Load the draft model or the head, if drafting needs one.

        Raises: InterposerError: see ``ModelDraftSource``.
        """
        self._settings = settings
        self._draft_source: DraftSource
        if settings.draft == NGRAM:
            self._draft_source = NgramDraftSource()
        elif settings.draft == HEADS:
            self._draft_source = load_checkpoint_head(settings, target)
        elif isinstance(settings.draft, str | Path):
            # A path can hold an EAGLE-3 head or a draft model; its config tells which.
            head = load_eagle3_head(settings.draft, settings, target)
            self._draft_source = head or ModelDraftSource(settings, target)
        else:
            self._draft_source = ModelDraftSource(settings, target)
        planned = target.planned
        device = planned.placement.device.torch_device
        self._saved = allocate_saved_states(planned.model, target.max_sequences, device)

    def start(self, engine: Engine, site: Site) -> list[str]:
        """Enable speculative decoding in an engine, and return notes that describe the method.

        Args:
            site: Site of the engine's sampler.
        """
        settings, draft_source = self._settings, self._draft_source
        vocab_size, num_drafts = engine.model.config.vocab_size, settings.tokens
        sampling = DraftSampling(site, vocab_size, num_drafts, certain=draft_source.certain)
        proposer = draft_source.proposer(engine, sampling, num_drafts)
        cost_model = DraftCostModel(engine.agree) if settings.adaptive else None
        engine.speculation = Speculator(
            engine, proposer, sampling, num_drafts, cost_model, self._saved
        )
        note = f"speculation: up to {num_drafts} tokens by {draft_source}"
        return [*draft_source.notes, note]


def allocate_saved_states(model: object, max_sequences: int, device: str) -> SavedStates | None:
    """Allocate copies of recurrent states; return None for models without recurrent layers."""
    layers = getattr(model, "state_layers", ())
    return SavedStates(layers, max_sequences, device) if len(layers) else None
