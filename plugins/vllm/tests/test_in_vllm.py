"""Models generate the same tokens in vLLM with interposer's kernels as with its own.

``make test-vllm`` runs this in an environment with vLLM. Engines run in processes of their own: one
with the plugin and one without.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

Runs = list[dict[str, Any]]

ROOT = Path(__file__).parents[3]
TRAINED = ROOT / "examples" / "models" / "stdlib-lm"
TEXTS = (
    "import os\n\n\ndef main():",
    "class Stack:\n    def push(self, item):",
    "for line in open(path):",
)
# Of the trained model, in order.
RUNS = (
    "eager",
    "rounded",
    "compiled",
    "compiled, shared blocks and guesses",
    "shared blocks",
    "guesses",
)
EXACT = [run for run in RUNS if run != "rounded"]

# One worker starts the engines.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3600), pytest.mark.xdist_group("vllm")]


def trained(texts: Sequence[str] = TEXTS, **options: object) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(TRAINED / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in texts]
    engine_options = {"dtype": "float32", **options}
    return {"model": str(TRAINED), "options": engine_options, "prompts": prompts, "tokens": 256}


def paged() -> Runs:
    """Return runs whose prompts share blocks of the cache, are cut into steps, or are guessed from.

    The longer prompts begin with the same blocks of 128 tokens, and join steps of others' tokens.
    """
    source = inspect.getsource(textwrap)
    texts = (source[:1400], source[:1400] + source[3000:3100], *TEXTS)
    cut = {"max_model_len": 1024, "max_num_batched_tokens": 96}
    shared: dict[str, Any] = {"enable_prefix_caching": True}
    guesses = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}
    guessed: dict[str, Any] = {"speculative_config": guesses}
    return [
        trained(texts, **cut, **shared, **guessed),
        trained(texts, enforce_eager=True, **cut, **shared),
        trained(texts, enforce_eager=True, **cut, **guessed),
    ]


def scored(dtype: str) -> dict[str, Any]:
    """Return a compiled run that is asked for the log probabilities of a text as well."""
    (ids,) = trained((inspect.getsource(textwrap)[:1400],))["prompts"]
    return {**trained(dtype=dtype), "scored": ids}


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Return all runs, in the order of their names."""
    return [trained(enforce_eager=True), scored("bfloat16"), scored("float32"), *paged()]


@pytest.fixture(scope="module")
def own(runs: Runs, run_in_vllm: Callable[..., Runs]) -> Runs:
    """Return the results of vLLM alone for the trained model."""
    return run_in_vllm(runs, VLLM_PLUGINS="")


@pytest.fixture(scope="module")
def bridged(runs: Runs, run_in_vllm: Callable[..., Runs]) -> Runs:
    """Return the results of vLLM with interposer's kernels for the same runs."""
    return run_in_vllm(runs)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("way", ["alone", "batch"])
def test_a_trained_model_generates_the_same_tokens(
    own: Runs, bridged: Runs, name: str, way: str
) -> None:
    number = RUNS.index(name)
    assert bridged[number][way] == own[number][way]
    assert all(len(tokens) == 256 for tokens in own[number][way])


def test_bfloat16_logprobs_are_as_close_to_float32_as_vllms(own: Runs, bridged: Runs) -> None:
    """Both round each layer's results to bfloat16, so both err alike.

    Of n independent errors of equal size, the ratio of two root mean squares deviates from 1 by
    1 / sqrt(n): five of that are allowed.
    """
    exact = torch.tensor(own[RUNS.index("compiled")]["scores"])
    errors = [
        (torch.tensor(results[RUNS.index("rounded")]["scores"]) - exact).square().mean().sqrt()
        for results in (own, bridged)
    ]
    assert len(exact) > 200
    assert errors[1] <= errors[0] * (1 + 5 * len(exact) ** -0.5)


def test_linear_layers_attention_and_the_tied_head_are_taken_over(bridged: Runs) -> None:
    report = bridged[0]["report"]
    assert report["kept"] == {}
    assert {name: reason for name, reason in report["seams"].items() if reason} == {}
    layers = 6
    # Norms and activations have no name, and are taken by class and width.
    unnamed = {place.partition(" of ")[0] for place in report["taken"] if " of " in place}
    assert unnamed == {"RMSNorm", "SiluAndMul"}
    assert len(report["taken"]) == layers * 5 + 1 + len(unnamed)
    assert "model.layers.0.self_attn.qkv_proj" in report["taken"]
    assert "model.layers.0.self_attn.attn" in report["taken"]
    assert "lm_head" in report["taken"]


def test_the_report_explains_every_choice(bridged: Runs) -> None:
    choices = bridged[0]["report"]["explanation"]["choices"]
    linear = [choice for choice in choices if choice["name"] == "linear"]
    assert {choice["dtype"] for choice in linear} == {"float32"}
    assert all(choice["why"] for choice in linear)


def test_the_kill_switch_leaves_vllm_unchanged(own: Runs) -> None:
    assert all("report" not in result for result in own)
