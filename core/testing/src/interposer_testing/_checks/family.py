"""Check of a model family: compares a model with random weights with transformers.

Dimensions: T tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from interposer import Candidate, Config, Device
from interposer.errors import install_command
from interposer.records import load_target
from interposer_testing._checks.fault import Fault

# The kit must not depend on these packages, so they are imported only for this check.
_LOAD = "interposer_engine:load"
_FEATURES = "interposer_engine:EncoderFeatures"
_TRANSFORMERS = "transformers"
_PROMPT_TOKENS = (1, 5, 24, 70)
_STEPS = 6
# Error bound relative to the largest logit: reordered float32 sums of a small model differ by less.
_RELATIVE_BOUND = 1e-4


def peer_of(architecture: str, other_names: Iterable[str] = ()) -> tuple[Any, str]:
    """Return the model class in transformers and ""; without a class, None and the reason.

    Args:
        other_names: names under which transformers may have the architecture instead.
    """
    for required in (_TRANSFORMERS, _LOAD.partition(":")[0]):
        try:
            import_module(required)
        except ModuleNotFoundError as error:
            command = install_command("interposer-engine")
            return None, f"{error.name} is not installed. Try: {command}"
    package = import_module(_TRANSFORMERS)
    names = (name for name in (architecture, *other_names) if hasattr(package, name))
    peer = next((getattr(package, name) for name in names), None)
    return peer, "" if peer else f"transformers has no class {architecture}"


def check_family(
    candidate: Candidate,
    architecture: str,
    peer: Any,
    config: Mapping[str, Any],
    device: Device,
    seed: int,
) -> list[Fault]:
    """Compare the family's model for ``config`` with the model of transformers.

    The transformers model gets random weights and is saved; the family loads that checkpoint with
    ``config`` as config.json. Float32 logits must differ by at most 1e-4 of the largest logit,
    and greedy decoding must give the same tokens, alone and in a batch. In an encoder-decoder
    model, the encoder reads the prompts, or random features if transformers calls the encoder's
    input ``input_features``; the config must then have ``decoder_start_token_id``.

    Args:
        peer: the model's class in transformers.
    """
    with torch.random.fork_rng(devices=()), TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        # ``to(torch.float32)`` would also convert complex buffers, such as rotations of an encoder.
        model = peer(peer.config_class(**config)).eval().float()
        for tensor in model.state_dict().values():
            if tensor.dim() == 1 and tensor.is_floating_point():
                # Change norm weights from 1 and biases from 0, or they would have no effect.
                tensor.add_(torch.randn(tensor.shape), alpha=0.2)
        with _silence():
            model.save_pretrained(folder)
        # Replace the saved config, in which transformers has filled in its own defaults.
        Path(folder, "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        loaded = load_target(_LOAD)(
            folder,
            dtype="float32",
            cache_tokens=4096,
            max_sequences=len(_PROMPT_TOKENS),
            config=Config(
                platform=device.platform,
                models={architecture: candidate.qualified_name},
                canary="off",
                tables=False,
            ),
        )
        start_tokens = _start_tokens(config) if model.config.is_encoder_decoder else []
        text_config = model.config.get_text_config(decoder=bool(start_tokens) or None)
        # A model without position embeddings has no context limit in its config.
        default_context = max(_PROMPT_TOKENS) + _STEPS
        context = getattr(text_config, "max_position_embeddings", default_context) - _STEPS
        prompts = [
            torch.randint(text_config.vocab_size, (min(length, context),)).tolist()
            for length in _PROMPT_TOKENS
        ]
        return list(_faults(loaded, _Peer(model, start_tokens), prompts))


@dataclass(frozen=True)
class _Peer:
    """The model of transformers with which a family's model is compared.

    Attributes:
        start_tokens: first tokens of the decoder in an encoder-decoder model; otherwise empty.
    """

    model: Any
    start_tokens: list[int]

    def logits(self, prompt: list[int], following: list[int]) -> Tensor:
        """Return the logits ``[T, V]`` of the transformers model for all decoder tokens."""
        if not self.start_tokens:
            ids = torch.tensor([[*prompt, *following]])
            kinds = {}
            if self.has_prefix:
                kinds["token_type_ids"] = torch.tensor([[0] * len(prompt) + [1] * len(following)])
            return self.model(ids, **kinds).logits[0].float()  # type: ignore[no-any-return]
        source, ids = torch.tensor([prompt]), torch.tensor([[*self.start_tokens, *following]])
        if self.reads_features:
            features = self._features(prompt)[None]
            output = self.model(input_features=features, decoder_input_ids=ids)
            return output.logits[0].float()  # type: ignore[no-any-return]
        # Without masks, transformers ignores random tokens that equal the padding token.
        masks = {"attention_mask": source >= 0, "decoder_attention_mask": ids >= 0}
        masks = {name: mask.long() for name, mask in masks.items()}
        return self.model(input_ids=source, decoder_input_ids=ids, **masks).logits[0].float()  # type: ignore[no-any-return]

    def family_logits(self, loaded: Any, prompt: list[int], following: list[int]) -> Tensor:
        """Return the logits ``[T, V]`` of the family's model for all decoder tokens."""
        if not self.start_tokens:
            return loaded.logits([*prompt, *following]).float().cpu()  # type: ignore[no-any-return]
        source = self.family_prompt(prompt)
        logits = loaded.logits([*self.start_tokens, *following], source=source)
        return logits.float().cpu()  # type: ignore[no-any-return]

    @property
    def has_prefix(self) -> bool:
        """Whether the tokens of a prompt attend to each other in both directions."""
        text_config = self.model.config.get_text_config()
        takes_kinds = "token_type_ids" in signature(self.model.forward).parameters
        return takes_kinds and getattr(text_config, "use_bidirectional_attention", None) is True

    @property
    def reads_features(self) -> bool:
        """Whether the encoder reads features instead of token ids."""
        return bool(self.start_tokens) and self.model.main_input_name == "input_features"

    def family_prompt(self, prompt: list[int]) -> Any:
        """Return the prompt for the family's model, or features that are drawn from the prompt."""
        return load_target(_FEATURES)(self._features(prompt)) if self.reads_features else prompt

    def _features(self, prompt: list[int]) -> Tensor:
        config, encoder = self.model.config, self.model.get_encoder()
        # transformers takes features of one length: those from which it makes all positions.
        num_frames = config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        generator = torch.Generator().manual_seed(sum(prompt))
        return torch.randn(config.num_mel_bins, num_frames, generator=generator)


def _start_tokens(config: Mapping[str, Any]) -> list[int]:
    tokens = (config.get(name) for name in ("decoder_start_token_id", "forced_bos_token_id"))
    return [token for token in tokens if token is not None]


@contextmanager
def _silence() -> Iterator[None]:
    """Disable the progress bars of transformers within a ``with`` block."""
    logging = import_module(f"{_TRANSFORMERS}.utils.logging")
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


@torch.inference_mode()
def _faults(loaded: Any, peer: _Peer, prompts: list[list[int]]) -> Iterator[Fault]:
    logit_bound = 0.0
    for prompt in prompts:
        where = f"logits of {len(prompt)} tokens"
        # A decoder needs some input of its own; the reversed prompt is as good as any.
        following = prompt[::-1] if peer.start_tokens else []
        expected = peer.logits(prompt, following)
        logits = peer.family_logits(loaded, prompt, following)
        if logits.shape != expected.shape:
            shapes = f"{[*expected.shape]} expected, got {[*logits.shape]}"
            yield Fault("model", where, shapes)
            return
        max_error = _RELATIVE_BOUND * float(expected.abs().max())
        logit_bound = max(logit_bound, max_error)
        error = float((logits - expected).abs().max())
        if not error <= max_error:
            reason = f"the error is {error:.3g}, the bound is {max_error:.3g}"
            yield Fault("model", where, reason, error, max_error)
            return
    options = {"max_new_tokens": _STEPS, "ignore_eos": True}
    sources = [peer.family_prompt(prompt) for prompt in prompts]
    alone = [loaded.generate([source], **options)[0] for source in sources]
    together = loaded.generate(sources, **options)
    for batching, completions in (("alone", alone), ("in a batch", together)):
        for prompt, completion in zip(prompts, completions, strict=True):
            tokens = _greedy(peer, prompt, list(completion.token_ids), logit_bound)
            if tokens:
                where = f"tokens after {len(prompt)}, {batching}"
                yield Fault("model", where, f"{tokens} expected, got {list(completion.token_ids)}")


def _greedy(peer: _Peer, prompt: list[int], tokens: list[int], logit_bound: float) -> list[int]:
    """Return the expected tokens up to the first wrong one, or an empty list if all are correct.

    A token is correct if the difference to the largest logit is within the errors of two logits.
    """
    for count, token in enumerate(tokens):
        logits = peer.logits(prompt, tokens[:count])[-1]
        # Rounding may swap two nearly equal logits, so compare values and not the argmax.
        if float(logits.max() - logits[token]) > 2 * logit_bound:
            return [*tokens[:count], int(logits.argmax())]
    return []
