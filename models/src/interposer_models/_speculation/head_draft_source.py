"""Loading of MTP heads from checkpoints, with a separate KV cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from interposer import Resolver, Site
from interposer.errors import ConfigError
from interposer_models._checkpoint.checkpoint import Checkpoint
from interposer_models._checkpoint.weight_check import WeightCheck
from interposer_models._checkpoint.weights import Weights
from interposer_models._decoder.family import DecoderFamily
from interposer_models._decoder.hidden_states import HiddenStates
from interposer_models._decoder.prediction_head import PredictionHead
from interposer_models._dequantization.decision import dequantize_once
from interposer_models._engine.engine import Engine
from interposer_models._family_choice import blamed_on_family
from interposer_models._speculation.draft_checks import check_sources
from interposer_models._speculation.draft_sampling import DraftSampling
from interposer_models._speculation.head_runner import HeadRunner
from interposer_models._speculation.heads import HeadProposer
from interposer_models._speculation.proposer import Proposer
from interposer_models._speculation.settings import Speculation
from interposer_models._speculation.speculator import is_reproducible
from interposer_models._speculation.target import Target


class HeadDraftSource:
    """A loaded MTP head.

    Args:
        page_size: Page size of the head's attention.
        description: Description for people.
    """

    certain = False

    def __init__(
        self,
        head: PredictionHead,
        settings: Speculation,
        target: Target,
        page_size: int,
        description: str,
    ) -> None:
        planned = target.planned
        tokens = settings.cache_tokens or target.default_tokens
        self._description = description
        self._runner = HeadRunner(
            head,
            planned.placement.device.torch_device,
            page_size=page_size,
            num_pages=-(-tokens // page_size),
            max_sequences=target.max_sequences,
            max_step_tokens=target.max_step_tokens,
            numerics=planned.numerics,
        )

    def __str__(self) -> str:
        return self._description

    def proposer(self, engine: Engine, sampling: DraftSampling, num_drafts: int) -> Proposer:
        """Create the proposer of an engine's sequences; see ``DraftSource``.

        Raises: ConfigError: the model does not expose hidden states.
        """
        engine.runner.record_hidden_states(HiddenStates(self._runner.head.layers))
        return HeadProposer(self._runner, engine.runner, sampling, partial(is_reproducible, engine))


def load_checkpoint_head(settings: Speculation, target: Target) -> HeadDraftSource:
    """Load the MTP head that the model's own checkpoint contains.

    Raises:
        ConfigError: the checkpoint contains no supported head.
        CheckpointError: the tensors of the head are incomplete.
    """
    planned, checkpoint = target.planned, target.checkpoint
    check_sources(planned.path, planned.model)
    site = Site(planned.resolver, "", planned.dtype)
    head: PredictionHead | None = None
    # Only families that derive from DecoderFamily can define an MTP head.
    if isinstance(checkpoint, Checkpoint) and isinstance(planned.decoder, DecoderFamily):
        model: Any = planned.model
        with torch.device("meta"), blamed_on_family(planned.resolver, "prediction_head"):
            head = planned.decoder.prediction_head(site, model, planned.page_size)
    if (
        head is None
        or not isinstance(checkpoint, Checkpoint)
        or not any(map(head.renamed, checkpoint.names()))
    ):
        raise ConfigError(
            f"{planned.path} holds no head that predicts further tokens. Try: "
            "speculation='ngram', or the path of a draft model"
        )
    dequantize_once(head, site, planned.placement)
    load_head(head, checkpoint, target)
    return HeadDraftSource(head, settings, target, planned.page_size, "the checkpoint's own head")


def load_head(
    head: PredictionHead, checkpoint: Checkpoint, target: Target, resolver: Resolver | None = None
) -> None:
    """Load the tensors of a head from a checkpoint.

    Args:
        resolver: Resolver of the head's kernels; None for that of the model.
    """
    planned = target.planned
    device = planned.placement.device.torch_device
    weights = Weights(head, device, WeightCheck.of(planned))

    def is_read(name: str) -> bool:
        renamed = head.renamed(name)
        return renamed is not None and not renamed.startswith(head.unread)

    tensors = checkpoint.stream(is_read)
    names = [*filter(is_read, checkpoint.names())]
    scheme = (resolver or planned.resolver).scheme
    with planned.numerics():
        dequantized = tensors if scheme is None else scheme.restored(tensors, weights)
        weights.load(dequantized, checkpoint.path, None, names)
        head.reserve_positions(0, device)
