"""The check of a model family: a model with random weights, beside the one of transformers.

Dimensions: T tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from interposer import Candidate, Config, Device
from interposer.records import load_target
from interposer_testing._checks.fault import Fault

# Both stand above the kit, so they are named here and imported when they are needed.
_LOAD = "interposer_models:load"
_PEERS = "transformers"
_LENGTHS = (1, 5, 24, 70)
_STEPS = 6
# Of the largest logit. Sums of a small model in float32, in another order, differ by less.
_SHARE = 1e-4


def peer_of(architecture: str, others: Iterable[str] = ()) -> tuple[Any, str]:
    """Return the class of transformers of that name, or None and why there is none.

    Args:
        others: names of the same architecture, of which transformers may know one instead.
    """
    for package in (_PEERS, _LOAD.partition(":")[0]):
        try:
            import_module(package)
        except ModuleNotFoundError as error:
            return None, f"{error.name} is not installed. Try: pip install interposer-models"
    known = import_module(_PEERS)
    found = next((getattr(known, n) for n in (architecture, *others) if hasattr(known, n)), None)
    return found, "" if found else f"transformers has no class {architecture}"


def check_family(
    candidate: Candidate,
    architecture: str,
    peer: Any,
    config: Mapping[str, Any],
    device: Device,
    seed: int,
) -> list[Fault]:
    """Return the faults of a model that the family builds for ``config``.

    A model of transformers for the same config is filled with random weights and saved, and loaded
    by the family, which reads ``config`` itself. Logits in float32 must differ by at most 1e-4 of
    the largest, and the tokens of greatest logits be equal, alone and in a batch. An encoder reads
    the prompts, where there is one; the config names ``decoder_start_token_id`` then.

    Args:
        peer: class of the model in transformers.
    """
    with torch.random.fork_rng(devices=()), TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        model = peer(peer.config_class(**config)).eval().to(torch.float32)
        for tensor in model.state_dict().values():
            if tensor.dim() == 1 and tensor.is_floating_point():
                # Norms that start as ones, and biases as zeros, would not show what they do.
                tensor.add_(torch.randn(tensor.shape), alpha=0.2)
        with _silence():
            model.save_pretrained(folder)
        Path(folder, "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        loaded = load_target(_LOAD)(
            folder,
            dtype="float32",
            cache_tokens=4096,
            max_sequences=len(_LENGTHS),
            config=Config(
                platform=device.platform,
                models={architecture: candidate.qualified_name},
                canary="off",
                tables=False,
            ),
        )
        starts = _starts(config) if model.config.is_encoder_decoder else []
        sizes = model.config.get_text_config(decoder=bool(starts) or None)
        size = sizes.vocab_size
        # A model without positions states no context.
        context = getattr(sizes, "max_position_embeddings", max(_LENGTHS) + _STEPS) - _STEPS
        prompts = [torch.randint(size, (min(n, context),)).tolist() for n in _LENGTHS]
        return list(_faults(loaded, _Peer(model, starts), prompts))


@dataclass(frozen=True)
class _Peer:
    """The model of transformers.

    Attributes:
        starts: tokens with which its decoder starts, if a prompt is what its encoder reads.
    """

    model: Any
    starts: list[int]

    def logits(self, prompt: list[int], following: list[int]) -> Tensor:
        """Return the logits ``[T, V]`` of the tokens that the decoder is given."""
        if not self.starts:
            ids = torch.tensor([[*prompt, *following]])
            return self.model(ids).logits[0].float()  # type: ignore[no-any-return]
        source, ids = torch.tensor([prompt]), torch.tensor([[*self.starts, *following]])
        # Else what equals the token of padding would not be seen.
        masks = {"attention_mask": source >= 0, "decoder_attention_mask": ids >= 0}
        masks = {name: mask.long() for name, mask in masks.items()}
        return self.model(input_ids=source, decoder_input_ids=ids, **masks).logits[0].float()  # type: ignore[no-any-return]

    def own_logits(self, loaded: Any, prompt: list[int], following: list[int]) -> Tensor:
        """Return what the loaded model gives in their place."""
        if not self.starts:
            return loaded.logits([*prompt, *following]).float().cpu()  # type: ignore[no-any-return]
        found = loaded.logits([*self.starts, *following], source=prompt)
        return found.float().cpu()  # type: ignore[no-any-return]


def _starts(config: Mapping[str, Any]) -> list[int]:
    """Return the tokens with which the decoder of an encoder-decoder starts."""
    named = (config.get(name) for name in ("decoder_start_token_id", "forced_bos_token_id"))
    return [token for token in named if token is not None]


@contextmanager
def _silence() -> Iterator[None]:
    """Keep transformers from showing how far it has come within a ``with`` block."""
    bars = import_module(f"{_PEERS}.utils.logging")
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


@torch.inference_mode()
def _faults(loaded: Any, peer: _Peer, prompts: list[list[int]]) -> Iterator[Fault]:
    bound = 0.0
    for prompt in prompts:
        where = f"logits of {len(prompt)} tokens"
        following = prompt[::-1] if peer.starts else []
        expected = peer.logits(prompt, following)
        found = peer.own_logits(loaded, prompt, following)
        if found.shape != expected.shape:
            shapes = f"{[*expected.shape]} expected, got {[*found.shape]}"
            yield Fault("model", where, shapes)
            return
        allowed = _SHARE * float(expected.abs().max())
        bound = max(bound, allowed)
        error = float((found - expected).abs().max())
        if not error <= allowed:
            reason = f"off by {error:.3g}, allowed is {allowed:.3g}"
            yield Fault("model", where, reason, error, allowed)
            return
    options = {"max_new_tokens": _STEPS, "ignore_eos": True}
    alone = [loaded.generate([prompt], **options)[0] for prompt in prompts]
    for how, completions in (("alone", alone), ("in a batch", loaded.generate(prompts, **options))):
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = _greedy(peer, prompt, list(completion.token_ids), bound)
            if tokens:
                where = f"tokens after {len(prompt)}, {how}"
                yield Fault("model", where, f"{tokens} expected, got {list(completion.token_ids)}")


def _greedy(peer: _Peer, prompt: list[int], found: list[int], bound: float) -> list[int]:
    """Return the tokens of the greatest logits, or nothing if ``found`` are some of these.

    Which of two logits that are closer than the errors of both is the greater, is chance.
    """
    for count, token in enumerate(found):
        logits = peer.logits(prompt, found[:count])[-1]
        if float(logits.max() - logits[token]) > 2 * bound:
            return [*found[:count], int(logits.argmax())]
    return []
