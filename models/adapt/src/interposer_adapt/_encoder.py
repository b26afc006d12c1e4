"""The entry point ``load_encoder``: embeds or classifies texts by a transformers model.

The vectors of a text's tokens are pooled to one vector as the checkpoint's sentence-transformers
files state: modules.json, and a config.json for each module.

Dimensions: B texts, T tokens, H hidden size.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize

from interposer import Config, effective_config, place
from interposer.errors import CheckpointError, RequestError, UnknownNameError, UnsupportedModelError
from interposer_adapt._api import Adapted, adapt
from interposer_engine.parts import (
    ClosedModel,
    FairLock,
    WeightCheck,
    is_listing,
    non_finite,
    open_folder,
    read_json,
)

Pool = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of token vectors to one vector per text, with length limit and prompts.

    Attributes:
        modes: names of ``POOLS``; the vectors of several modes are concatenated.
        unit: vectors are scaled to unit length.
        max_tokens: longer texts are truncated; None uses the tokenizer's limit.
        prompts: texts that can be prepended, by name.
        default_prompt: name of the prompt that is prepended by default.
    """

    modes: tuple[str, ...] = ("mean",)
    unit: bool = False
    max_tokens: int | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt: str | None = None

    @classmethod
    def of(cls, folder: Path) -> Pooling:
        """Read the pooling from the files in ``folder``; without files, average all tokens.

        Raises:
            CheckpointError: a file is corrupt.
            UnsupportedModelError: a file names an unsupported module or pooling mode.
        """
        if not (folder / "modules.json").is_file():
            return cls()
        modes: tuple[str, ...] = ("mean",)
        unit = False
        for path, kind in _modules(folder):
            if kind == "Pooling":
                modes = _modes(folder / path / "config.json")
            elif kind == "Normalize":
                unit = True
            elif kind != "Transformer":
                raise UnsupportedModelError(
                    folder, f"modules.json has a {kind!r}; read are Transformer, Pooling, Normalize"
                )
        settings = _optional(folder / "config_sentence_transformers.json")
        max_tokens = _optional(folder / "sentence_bert_config.json").get("max_seq_length")
        prompts = {k: v for k, v in (settings.get("prompts") or {}).items() if isinstance(v, str)}
        return cls(modes, unit, max_tokens, prompts, settings.get("default_prompt_name"))

    def __call__(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Pool token vectors to ``[B, H * modes]`` float32.

        Args:
            hidden: ``[B, T, H]``.
            mask: ``[B, T]``, 1 for tokens of the text, 0 for padding.
        """
        wide = hidden.float()
        out = torch.cat([POOLS[mode](wide, mask) for mode in self.modes], dim=1)
        return normalize(out, dim=1) if self.unit else out


def _cls(hidden: Tensor, mask: Tensor) -> Tensor:
    # The first token that is no padding: padding may be on the left.
    return hidden[torch.arange(len(hidden)), mask.argmax(1)]


def _max(hidden: Tensor, mask: Tensor) -> Tensor:
    return hidden.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)


def _mean(hidden: Tensor, mask: Tensor) -> Tensor:
    return _sum(hidden, mask) / mask.sum(1, keepdim=True).clamp(min=1)


def _mean_sqrt_len(hidden: Tensor, mask: Tensor) -> Tensor:
    return _sum(hidden, mask) / mask.sum(1, keepdim=True).clamp(min=1).sqrt()


def _weighted_mean(hidden: Tensor, mask: Tensor) -> Tensor:
    weights = mask.cumsum(1) * mask
    return _sum(hidden, weights) / weights.sum(1, keepdim=True).clamp(min=1)


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    return hidden[torch.arange(len(hidden)), last]


def _sum(hidden: Tensor, weights: Tensor) -> Tensor:
    return (hidden * weights[..., None]).sum(1)


POOLS: dict[str, Pool] = {
    "cls": _cls,
    "lasttoken": _last,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt_len,
    "weightedmean": _weighted_mean,
}
"""By names of sentence-transformers: functions ``(hidden [B, T, H], mask [B, T]) -> [B, H]``."""
_RENAMED_MODES = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean"}
_RENAMED_MODES |= {"weightedmean_tokens": "weightedmean"}


def _modules(folder: Path) -> list[tuple[str, str]]:
    """Return the path and class name of each module that modules.json lists."""
    file = folder / "modules.json"
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
        return [(entry["path"], entry["type"].rpartition(".")[2]) for entry in modules]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(file, f"is no list of modules: {error}", "copy it again") from error


def _modes(file: Path) -> tuple[str, ...]:
    settings = read_json(file)
    stored_modes: Any = settings.get("pooling_mode")
    # Older files have a boolean for each mode instead.
    if stored_modes is None:
        enabled = [key.removeprefix("pooling_mode_") for key, on in settings.items() if on is True]
        stored_modes = [
            _RENAMED_MODES.get(name, name) for name in enabled if f"pooling_mode_{name}" in settings
        ]
    modes = (stored_modes,) if isinstance(stored_modes, str) else tuple(stored_modes)
    unknown = [mode for mode in modes if mode not in POOLS]
    if unknown or not modes:
        pooling = f"pools by {unknown}" if unknown else "names no pooling mode"
        raise UnsupportedModelError(file, f"{pooling}; known are {', '.join(POOLS)}")
    return modes


def _optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.is_file() else {}


_CLASSIFIER_SUFFIX = "ForSequenceClassification"
Text = str | tuple[str, str] | list[int]
"""A text, a pair of texts, or the token ids of a text."""
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "activation.Sigmoid": torch.sigmoid,
    "activation.Tanh": torch.tanh,
    "linear.Identity": lambda logits: logits,
}
_ACTIVATION_PREFIX = "torch.nn.modules."


def _score_activation(config: Any, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the function that turns a cross-encoder's logit into its score.

    sentence-transformers stores the name of the function in config.json, for example Identity for
    the models trained on MS MARCO; the default is the sigmoid.

    Raises: UnsupportedModelError: config.json names another function.
    """
    stored_settings = getattr(config, "sentence_transformers", None)
    name = stored_settings.get("activation_fn") if isinstance(stored_settings, dict) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    if name is None:
        return torch.sigmoid
    class_name = str(name).removeprefix(_ACTIVATION_PREFIX)
    if class_name not in _ACTIVATIONS:
        names = ", ".join(_ACTIVATION_PREFIX + supported for supported in _ACTIVATIONS)
        raise UnsupportedModelError(
            folder, f"config.json names the activation {name!r:.100}; known are {names}"
        )
    return _ACTIVATIONS[class_name]


class Encoder:
    """A model that embeds or classifies texts.

    ``interposer.explain(encoder.adapted)`` lists its kernels.

    Any thread may call the methods; threads take turns, batch by batch.
    ``with load_encoder(...) as encoder:`` closes the encoder at the end of the block.

    Attributes:
        adapted: the adapted model.
        tokenizer: the tokenizer of transformers.
        pooling: reduces the vectors of tokens to one vector.
        labels: names of the classes, in order; empty for an embedding model.
    """

    def __init__(
        self,
        adapted: Adapted[Any],
        tokenizer: Any,
        pooling: Pooling,
        labels: Sequence[str],
        score_activation: Callable[[Tensor], Tensor] = torch.sigmoid,
    ) -> None:
        self.adapted = adapted
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.labels = tuple(labels)
        self._score_activation = score_activation
        self._lock = FairLock()
        if tokenizer.pad_token is None:
            # The attention mask hides padding, so that any token can pad.
            tokenizer.pad_token = tokenizer.eos_token
        self._is_closed = False

    def __enter__(self) -> Self:
        """Return the encoder.

        Raises: RequestError: the encoder was closed.
        """
        self.adapted.model  # noqa: B018 - raises the error of a closed model
        return self

    def __exit__(self, *_: object) -> None:
        """Close the encoder."""
        self.close()

    def close(self) -> None:
        """Free the weights, after the batches that run; closing again does nothing.

        Later calls raise RequestError.
        """
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self.adapted = ClosedModel.of(self.adapted.model.name_or_path)
        gc.collect()  # modules and kernels refer to each other

    def __repr__(self) -> str:
        """Describe class, size, dtype, device and longest text of the encoder."""
        if self._is_closed:
            return f"<{type(self).__name__}: closed>"
        model = self.adapted.model
        placement = self.adapted.placement
        facts = [
            type(model).__name__,
            f"{model.num_parameters() / 1e6:.1f} million parameters",
            f"{model.dtype} on {placement.device.torch_device} ".removeprefix("torch.")
            + f"({placement.platform.name}: {placement.device.name})",
            f"texts of {self.pooling.max_tokens or self.tokenizer.model_max_length} tokens",
        ]
        return f"<{type(self).__name__} {model.name_or_path}: {', '.join(facts)}>"

    def embed(
        self,
        texts: str | Sequence[str] | Sequence[list[int]],
        *,
        prompt: str | None = None,
        batch_size: int = 32,
    ) -> Tensor:
        """Compute the vector of each text, ``[B, H]`` float32 on the CPU.

        Args:
            texts: a text, texts, or a list of token ids for each text. The encoder uses token ids
                unchanged: without a prompt, and without the tokenizer's special tokens.
            prompt: name of one of the checkpoint's prompts; None selects the default prompt, if
                any.
            batch_size: texts in one call of the model.
        Raises:
            RequestError: there are no texts, or the model is a classifier.
            UnknownNameError: the checkpoint has no such prompt.
        """

        def pooled(out: Any, mask: Tensor) -> Tensor:
            return self.pooling(out.last_hidden_state, mask).cpu()

        return torch.stack(self._run(self._prompted(texts, prompt), batch_size, pooled))

    def embed_tokens(
        self,
        texts: str | Sequence[str] | Sequence[list[int]],
        *,
        prompt: str | None = None,
        batch_size: int = 32,
    ) -> list[Tensor]:
        """Compute the last hidden states of each text, ``[T, H]`` float32: a vector per token.

        Arguments and errors are those of ``embed``. Tensors are on the CPU.
        """

        def by_text(out: Any, mask: Tensor) -> list[Tensor]:
            hidden, is_token = out.last_hidden_state.float().cpu(), mask.bool().cpu()
            return [row[tokens] for row, tokens in zip(hidden, is_token, strict=True)]

        return self._run(self._prompted(texts, prompt), batch_size, by_text)

    def classify(
        self, texts: Text | Sequence[Text], *, batch_size: int = 32
    ) -> list[dict[str, float]]:
        """Compute the probability of each label, for each text or pair of texts.

        Labels exclude each other, unless the checkpoint states ``multi_label_classification`` or
        has a single label, as rerankers have.

        Raises: RequestError: there are no texts, or the model has no classes.
        """
        logits = self._logits(texts, batch_size)
        problem_type = self.adapted.model.config.problem_type
        is_exclusive = len(self.labels) > 1 and problem_type != "multi_label_classification"
        probabilities = logits.softmax(1) if is_exclusive else logits.sigmoid()
        return [dict(zip(self.labels, row, strict=True)) for row in probabilities.tolist()]

    def score(
        self, pairs: tuple[str, str] | Sequence[tuple[str, str]], *, batch_size: int = 32
    ) -> list[float]:
        """Compute a cross-encoder's score of each pair, such as a query and a document.

        The activation is the one that the checkpoint names for sentence-transformers, otherwise
        the sigmoid.

        Raises: RequestError: there are no pairs, or the model has not exactly one label.
        """
        if len(self.labels) != 1:
            raise RequestError(
                f"The model has {len(self.labels)} labels; a cross-encoder has one. "
                "Try: encoder.classify(texts) with labels, encoder.embed(texts) without"
            )
        scores: list[float] = self._score_activation(self._logits(pairs, batch_size)[:, 0]).tolist()
        return scores

    def count_tokens(self, texts: Text | Sequence[Text], *, prompt: str | None = None) -> list[int]:
        """Return the number of tokens of each text or pair before truncation.

        Args:
            texts: texts or pairs, as for ``embed`` and ``classify``.
            prompt: name of the prompt of texts, as for ``embed``.
        Raises:
            RequestError: there are no texts.
            UnknownNameError: the checkpoint has no such prompt.
        """
        items = _texts(texts)
        if isinstance(items[0], list):
            return [len(token_ids) for token_ids in items]
        if isinstance(items[0], tuple):
            parts: Any = zip(*items, strict=True)
        else:
            parts = [items if self.labels else self._prompted(items, prompt)]
        with self._lock:
            tokenized = self.tokenizer(*map(list, parts), truncation=False, verbose=False)
        return [len(token_ids) for token_ids in tokenized["input_ids"]]

    def _prompted(self, texts: Any, prompt: str | None) -> list[Text]:
        """Return the texts with the prompt before each; token ids stay unchanged.

        Raises:
            RequestError: there are no texts, there is a pair, or the model is a classifier.
            UnknownNameError: the checkpoint has no such prompt.
        """
        if self.labels:
            raise RequestError("The model classifies texts. Try: encoder.classify(texts)")
        prefix = self._prompt(prompt)
        prompted_texts: list[Text] = []
        for text in _texts(texts):
            if isinstance(text, tuple):
                raise RequestError(f"{text!r:.100} is a pair. Try: encoder.embed([*pair])")
            prompted_texts.append(prefix + text if isinstance(text, str) else text)
        return prompted_texts

    def _logits(self, texts: Any, batch_size: int) -> Tensor:
        """Return the logits ``[B, labels]`` of texts or pairs, float32 on the CPU."""
        if not self.labels:
            raise RequestError("The model has no classes. Try: encoder.embed(texts)")
        rows = self._run(_texts(texts), batch_size, lambda out, _: out.logits.float().cpu())
        return torch.stack(rows)

    def _prompt(self, name: str | None) -> str:
        prompts = self.pooling.prompts or {}
        name = self.pooling.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in prompts:
            raise UnknownNameError("prompt", name, prompts)
        return prompts[name]

    def _run(self, texts: Sequence[Text], batch_size: int, get_rows: Any) -> list[Tensor]:
        """Run all texts in batches of similar length, and return the rows in input order.

        Args:
            texts: texts, pairs or lists of token ids, all of one kind.
            batch_size: texts in one call of the model.
            get_rows: function of the model's output and the mask that returns one tensor per text.
        """
        if type(batch_size) is not int or batch_size < 1:
            raise RequestError(f"batch_size is {batch_size!r}, must be a positive integer")
        # Texts of similar length are padded little.
        order = sorted(range(len(texts)), key=lambda i: _length(texts[i]), reverse=True)
        model = self.adapted.model
        rows: list[Tensor] = []
        for start in range(0, len(order), batch_size):
            batch = [texts[i] for i in order[start : start + batch_size]]
            # Padding and truncation are state of the tokenizer, so that threads take turns.
            with self._lock, torch.no_grad():
                inputs = {name: x.to(model.device) for name, x in self._inputs(batch).items()}
                rows += get_rows(model(**inputs), inputs["attention_mask"])
        input_order = sorted(range(len(order)), key=order.__getitem__)
        results = [rows[i] for i in input_order]
        for index, row in enumerate(results):
            if row.isnan().any():
                raise non_finite(f"Results of the text {index}")
        return results

    def _inputs(self, batch: Sequence[Text]) -> Mapping[str, Tensor]:
        """Return the model's padded inputs for a batch of one kind, on the CPU."""
        if isinstance(batch[0], list):
            return self._padded([token_ids for token_ids in batch if isinstance(token_ids, list)])
        parts: Any = zip(*batch, strict=True) if isinstance(batch[0], tuple) else [batch]
        limit = {} if self.pooling.max_tokens is None else {"max_length": self.pooling.max_tokens}
        inputs: Mapping[str, Tensor] = self.tokenizer(
            *map(list, parts), padding=True, truncation=True, return_tensors="pt", **limit
        )
        return inputs

    def _padded(self, batch: list[list[int]]) -> dict[str, Tensor]:
        """Pad lists of token ids.

        Raises: RequestError: a token id is outside the vocabulary.
        """
        vocab_size = self.adapted.model.config.get_text_config().vocab_size
        for token in chain.from_iterable(batch):
            if not 0 <= token < vocab_size:
                raise RequestError(f"Token id {token} is outside the vocabulary of {vocab_size}")
        width = max(map(len, batch))
        token_ids = torch.full((len(batch), width), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(token_ids)
        for row, ids in enumerate(batch):
            start = width - len(ids) if self.tokenizer.padding_side == "left" else 0
            token_ids[row, start : start + len(ids)] = torch.tensor(ids)
            mask[row, start : start + len(ids)] = 1
        return {"input_ids": token_ids, "attention_mask": mask}


def _length(text: Text) -> int:
    return sum(map(len, text)) if isinstance(text, tuple) else len(text)


def load_encoder(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    config: Config | None = None,
    *,
    quantization: str | Mapping[str, Any] | None = None,
) -> Encoder:
    """Load and adapt a model that embeds or classifies texts.

    Pooling follows the checkpoint's sentence-transformers files. Decoders are also supported.

    Args:
        path: a folder of transformers or sentence-transformers, or the name of a model on the hub.
        dtype: the dtype to compute in; ``"auto"`` is the checkpoint's dtype.
        config: policy for this model; it overrides every other source.
        quantization: a method that quantizes the weights, as for ``load``.
    Raises:
        CheckpointError: the checkpoint is incomplete or inconsistent, or cannot be fetched.
        UnsupportedModelError: the pooling or a cross-encoder's activation is not supported, or
            transformers lacks the model.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    checkpoint = open_folder(path)
    folder = str(checkpoint.path)
    names = checkpoint.config.get("architectures") or [""]
    # The class decides: AutoModel would drop the classification head.
    is_classifier = str(names[0]).endswith(_CLASSIFIER_SUFFIX)
    auto_class: Any = AutoModelForSequenceClassification if is_classifier else AutoModel
    settings = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = auto_class.from_pretrained(folder, dtype=dtype, **settings).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, **settings)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(folder, f"transformers does not load it: {error}") from error
    policy = effective_config(config)
    check = WeightCheck(policy.weight_check, place(policy).platform)
    check.check_parameters(model, checkpoint.path)
    labels = [model.config.id2label[i] for i in range(model.config.num_labels)]
    pooling = Pooling.of(checkpoint.path)
    activation: Callable[[Tensor], Tensor] = torch.sigmoid
    if is_classifier and len(labels) == 1:
        activation = _score_activation(model.config, checkpoint.path)
    adapted = adapt(model, config, quantization=quantization)
    return Encoder(adapted, tokenizer, pooling, labels if is_classifier else (), activation)


def _texts(texts: Any) -> list[Text]:
    """Return one text or several texts as a list.

    Raises: RequestError: ``texts`` is empty, or has elements of a wrong or mixed type.
    """
    if not is_listing(texts):
        raise RequestError(
            f"texts is {texts!r:.100} of the type {type(texts).__name__}, must be a text or a list "
            "of texts"
        )
    listed = [texts] if isinstance(texts, str | tuple) else list(texts)
    for index, text in enumerate(listed):
        is_pair = isinstance(text, tuple) and len(text) == 2
        is_token_ids = isinstance(text, list) and bool(text)
        if not (
            isinstance(text, str)
            or (is_pair and all(isinstance(part, str) for part in text))
            or (is_token_ids and all(type(token) is int for token in text))
        ):
            raise RequestError(
                f"Text {index} is {text!r:.100}, must be a text, its token ids, or for classes a "
                "pair of texts"
            )
    if len({type(text) for text in listed}) > 1:
        raise RequestError("Texts, token ids and pairs are mixed. Try: one call for each kind")
    if not listed:
        raise RequestError("There are no texts. Try: ['A cat sits on the mat.']")
    return listed
