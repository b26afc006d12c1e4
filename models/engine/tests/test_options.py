"""No option is passed over: in every mode each one changes an answer, or is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models.adapt.tests.test_adapt_paging import made
from models.conftest import write_checkpoint
from models.engine.tests.test_prefix_lm import config_of
from models.engine.tests.test_speculation import always
from models.tests.test_encoder_decoder import written
from tests.adapter_files import write_adapter

from interposer.errors import InterposerError, RequestError
from interposer_adapt import adapt, language_model
from interposer_engine import (
    AsyncLanguageModel,
    Completion,
    Constraint,
    LanguageModel,
    SamplingParams,
    load,
)
from interposer_engine.parts import TranscriptRules

PROMPT = [5, 9, 3, 7, 2, 11, 40]
WARM: dict[str, Any] = {"temperature": 2.0, "seed": 1}
# Settings of both requests, and those of the second one, which has to differ.
EFFECTS: dict[str, tuple[dict[str, Any], Any]] = {
    "max_new_tokens": ({}, 3),
    "temperature": ({"seed": 1}, 2.0),
    "top_k": (WARM, 1),
    "top_p": (WARM, 0.01),
    "min_p": (WARM, 1.0),
    "repetition_penalty": ({}, 1.5),
    "presence_penalty": ({}, 1.0),
    "frequency_penalty": ({}, 1.0),
    "seed": ({**WARM, "seed": 7}, 2),
    "stop": ({}, "the beginning of the text"),
    "stop_token_ids": ({}, "the second token"),
    "ignore_eos": ({}, True),
    "min_tokens": ({"stop_token_ids": "the second token"}, 4),
    "logit_bias": ({}, {7: 50.0}),
    "constraint": ({}, Constraint.regex("[a-c]{9}")),
    "top_logprobs": ({}, 2),
    "prompt_logprobs": ({}, 0),
    "adapter": ({}, "own"),
    "transcript": ({}, TranscriptRules(start=((7,),))),
}
# What each mode refuses; everything else has to be honoured.
REFUSED: dict[str, set[str]] = {
    "plain": set(),
    "speculation": set(),
    "adapter": set(),
    "asynchronous": set(),
    "encoder-decoder": {"prompt_logprobs", "adapter"},
    "prefix-LM": {"prompt_logprobs", "adapter"},
    "transformers": {"stop", "constraint", "adapter"},
}


def loaded(mode: str, folder: Path, llama: Path) -> LanguageModel:
    if mode == "encoder-decoder":
        written("bart", folder)
        return load(folder, "float32", cache_tokens=256)
    if mode == "prefix-LM":
        write_checkpoint(config_of("plain"), folder)
        return load(folder, "float32", cache_tokens=256)
    if mode == "transformers":
        return language_model(adapt(made("llama")), cache_tokens=256)
    speculation = always() if mode == "speculation" else None
    lm = load(llama, "float32", cache_tokens=256, speculation=speculation)
    sizes = {"model.layers.0.self_attn.o_proj": (64, 64)}
    lm.load_adapter("own", write_adapter(folder / "own", sizes))
    return lm


@pytest.mark.parametrize("mode", sorted(REFUSED))
def test_each_option_changes_the_answer_or_is_refused(
    mode: str, llama: Path, tmp_path: Path
) -> None:
    # A salt changes no answer, only which requests share a cached prefix.
    assert EFFECTS.keys() | {"cache_salt"} == SamplingParams.model_fields.keys()
    lm = loaded(mode, tmp_path / mode, llama)
    ask: Callable[..., Completion] = lambda **how: lm.generate([PROMPT], **how)[0]  # noqa: E731
    if mode == "asynchronous":
        model = AsyncLanguageModel(lm)

        async def asked(**how: Any) -> Completion:
            return (await model.generate([PROMPT], **how))[0]

        ask = lambda **how: asyncio.run(asked(**how))  # noqa: E731
    common: dict[str, Any] = {"max_new_tokens": 12}
    if mode == "adapter":
        common["adapter"] = "own"
    first = ask(**common)
    second, beginning = first.token_ids[1:2], (first.text[:1],)
    named = {"the second token": second, "the beginning of the text": beginning}
    refused = set()
    for field, (both, value) in EFFECTS.items():
        settings = {**common, **{n: named.get(str(v), v) for n, v in both.items()}}
        changed = {**settings, field: named.get(str(value), value)}
        if field == "adapter" and mode == "adapter":
            del settings["adapter"]
        with pytest.MonkeyPatch.context() as patch:
            if field == "ignore_eos":
                patch.setattr(lm.engine, "stop_token_ids", frozenset(second))
            before = ask(**settings)
            try:
                after, refusal = ask(**changed), ""
            except InterposerError as error:
                after, refusal = None, str(error)
        if after is None:
            assert field in refusal
            refused.add(field)
        assert after != before, field
    if mode == "asynchronous":
        model.close()
    assert refused == REFUSED[mode]


def test_an_engine_alone_finds_no_texts(llama: Path) -> None:
    lm = load(llama, "float32", cache_tokens=64)
    with pytest.raises(RequestError, match=r"stop is \('a',\), but an engine does not detokenize"):
        lm.engine.add([1, 2], SamplingParams(stop=("a",)))
