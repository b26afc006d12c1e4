"""Texts to vectors, and to classes, by any model of transformers on the kernels selected here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interposer import Config, effective_config, place
from interposer.errors import CheckpointError, RequestError, UnknownNameError
from interposer_models._adapt.handle import Adapted, adapt
from interposer_models._checkpoint.files import open_folder
from interposer_models._checkpoint.weight_check import WeightCheck
from interposer_models._encoder.pooling import Pooling
from interposer_models._engine.non_finite import non_finite
from interposer_models._engine.request_batch import is_listing
from interposer_models._fair_lock import FairLock

_CLASSIFIES = "ForSequenceClassification"
Text = str | tuple[str, str]


class Encoder:
    """A model that reads whole texts. ``interposer.explain(encoder.adapted)`` says what it runs on.

    Any thread may call it; threads take turns, batch by batch.

    Attributes:
        adapted: the model on its kernels.
        tokenizer: of transformers.
        pooling: how vectors of tokens become one.
        labels: names of the classes, in order; empty for a model that makes vectors.
    """

    def __init__(
        self, adapted: Adapted[Any], tokenizer: Any, pooling: Pooling, labels: Sequence[str]
    ) -> None:
        self.adapted = adapted
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.labels = tuple(labels)
        self._lock = FairLock()
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token

    def embed(
        self, texts: str | Sequence[str], *, prompt: str | None = None, batch_size: int = 32
    ) -> Tensor:
        """Return the vector of each text, ``[B, H]`` float32 on the CPU.

        Args:
            prompt: name of one of the checkpoint's prompts; None takes its default, if it has one.
            batch_size: texts in one call of the model.
        Raises:
            RequestError: there are no texts, or the model classifies.
            UnknownNameError: the checkpoint has no such prompt.
        """
        if self.labels:
            raise RequestError("The model classifies texts. Try: encoder.classify(texts)")
        front = self._prompt(prompt)
        given = []
        for text in _texts(texts):
            if isinstance(text, tuple):
                raise RequestError(f"{text!r:.100} is a pair. Try: encoder.embed([*pair])")
            given.append(front + text)

        def pooled(out: Any, mask: Tensor) -> Tensor:
            return self.pooling(out.last_hidden_state, mask)

        return self._run(given, batch_size, pooled)

    def classify(
        self, texts: Text | Sequence[Text], *, batch_size: int = 32
    ) -> list[dict[str, float]]:
        """Return the probability of each label, for each text or pair of texts.

        Labels exclude each other, unless the checkpoint says ``multi_label_classification`` or has
        a single one, as models have that score how well two texts belong together.

        Raises: RequestError: there are no texts, or the model has no classes.
        """
        if not self.labels:
            raise RequestError("The model has no classes. Try: encoder.embed(texts)")
        logits = self._run(_texts(texts), batch_size, lambda out, _: out.logits.float())
        kind = self.adapted.model.config.problem_type
        exclusive = len(self.labels) > 1 and kind != "multi_label_classification"
        chances = logits.softmax(1) if exclusive else logits.sigmoid()
        return [dict(zip(self.labels, row, strict=True)) for row in chances.tolist()]

    def _prompt(self, name: str | None) -> str:
        known = self.pooling.prompts or {}
        name = self.pooling.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in known:
            raise UnknownNameError("prompt", name, known)
        return known[name]

    def _run(self, texts: Sequence[Text], batch_size: int, read: Any) -> Tensor:
        """Return rows of all texts; those of one call are of about one length."""
        if type(batch_size) is not int or batch_size < 1:
            raise RequestError(f"batch_size is {batch_size!r}, must be a positive integer")
        order = sorted(range(len(texts)), key=lambda i: len("".join(texts[i])), reverse=True)
        model = self.adapted.model
        limit = {} if self.pooling.max_tokens is None else {"max_length": self.pooling.max_tokens}
        rows: list[Tensor] = []
        for start in range(0, len(order), batch_size):
            batch = [texts[i] for i in order[start : start + batch_size]]
            parts = zip(*batch, strict=True) if isinstance(batch[0], tuple) else [batch]
            # A tokenizer that pads and cuts is for one thread at a time.
            with self._lock, torch.no_grad():
                inputs = self.tokenizer(
                    *map(list, parts), padding=True, truncation=True, return_tensors="pt", **limit
                ).to(model.device)
                rows += read(model(**inputs), inputs["attention_mask"]).cpu()
        back = sorted(range(len(order)), key=order.__getitem__)
        results = torch.stack([rows[i] for i in back])
        if (wrong := results.isnan().flatten(1).any(1)).any():
            raise non_finite(f"Results of the text {int(wrong.int().argmax())}")
        return results


def load_encoder(
    path: str | Path,
    dtype: str | torch.dtype = "auto",
    config: Config | None = None,
    *,
    quantization: str | Mapping[str, Any] | None = None,
) -> Encoder:
    """Load a model that makes vectors or classes of texts, and adapt it.

    Vectors are pooled as the files of sentence-transformers in the checkpoint say. Decoders are
    taken as well.

    Args:
        path: a folder of transformers or sentence-transformers, or the name of a model on the hub.
        dtype: to compute in; ``"auto"`` is the checkpoint's.
        config: policy for this model, above every other source.
        quantization: a method by which weights are quantized, as ``load`` takes it.
    Raises:
        CheckpointError: the directory is incomplete or contradicts itself, or cannot be fetched.
        UnsupportedModelError: it pools as nothing here does, or transformers lacks the model.
    """
    from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    checkpoint = open_folder(path)
    folder = str(checkpoint.path)
    names = checkpoint.config.get("architectures") or [""]
    classifies = str(names[0]).endswith(_CLASSIFIES)
    kind: Any = AutoModelForSequenceClassification if classifies else AutoModel
    settings = {"local_files_only": True, "trust_remote_code": False}
    try:
        model = kind.from_pretrained(folder, dtype=dtype, **settings).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, **settings)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(folder, f"transformers does not load it: {error}") from error
    policy = effective_config(config)
    check = WeightCheck(policy.weight_check, place(policy).platform)
    check.check_parameters(model, checkpoint.path)
    labels = [model.config.id2label[i] for i in range(model.config.num_labels)]
    adapted = adapt(model, config, quantization=quantization)
    return Encoder(adapted, tokenizer, Pooling.of(checkpoint.path), labels if classifies else ())


def _texts(texts: Any) -> list[Text]:
    """Return texts as a list.

    Raises: RequestError: they are none.
    """
    if not is_listing(texts):
        raise RequestError(
            f"texts is {texts!r:.100} of the type {type(texts).__name__}, must be a text or a list "
            "of texts"
        )
    given = [texts] if isinstance(texts, str | tuple) else list(texts)
    for index, text in enumerate(given):
        pair = isinstance(text, tuple) and len(text) == 2
        if not isinstance(text, str) and not (pair and all(isinstance(t, str) for t in text)):
            raise RequestError(
                f"Text {index} is {text!r:.100}, must be a text, or for classes a pair of texts"
            )
    if len({type(text) for text in given}) > 1:
        raise RequestError("Texts and pairs are mixed. Try: one call for each kind")
    if not given:
        raise RequestError("There are no texts. Try: ['A cat sits on the mat.']")
    return given
