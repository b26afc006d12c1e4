"""Log probabilities of prompts are those of ``logits``, once for each token, under any schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models.conftest import CONFIGS, write_checkpoint
from models.engine.tests.test_prefix_lm import config_of
from models.engine.tests.test_speculation import always, idle
from models.engine.tests.test_speculation import prompts_of as mixed
from models.tests.test_encoder_decoder import written
from tests.adapter_files import write_adapter
from tests.landing import num_examples

from interposer.errors import RequestError
from interposer_engine import Completion, LanguageModel, SamplingParams, load

SMALL: dict[str, Any] = {"cache_tokens": 160, "max_sequences": 3, "max_step_tokens": 24}
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared pages": {"prefix_cache": True},
    "guesses": {"speculation": always()},
}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"model.layers.0.self_attn.o_proj": (64, 64), "lm_head": (256, 64)}
    return write_adapter(tmp_path_factory.mktemp("adapter") / "own", sizes)


@pytest.fixture(scope="module")
def plain(llama: Path, adapter: Path) -> LanguageModel:
    lm = load(llama, "float32", cache_tokens=2048)
    lm.load_adapter("own", adapter)
    return lm


@pytest.fixture(scope="module")
def small(llama: Path, adapter: Path) -> dict[str, LanguageModel]:
    """Models in caches so small that sequences are preempted."""
    made = {name: load(llama, "float32", **SMALL, **how) for name, how in LAYERS.items()}
    for lm in made.values():
        lm.load_adapter("own", adapter)
    return made


def check(found: Completion, logits: torch.Tensor, count: int) -> None:
    """Compare what is told of a prompt with its ``logits``, ``[T, V]``."""
    prompt, told = found.prompt_token_ids, found.prompt_logprobs
    assert [each.token_id for each in told] == list(prompt[1:])
    for each, row in zip(told, logits.log_softmax(-1), strict=False):
        assert each.logprob == pytest.approx(float(row[each.token_id]), abs=1e-4)
        assert len(each.top_logprobs) == count
        values, _ = row.topk(max(count, 1))
        assert [v for _, v in each.top_logprobs] == pytest.approx(values[:count].tolist(), abs=1e-4)
        likelier = int((row > row[each.token_id] + 1e-4).sum())
        assert likelier < each.rank <= 1 + int((row > row[each.token_id] - 1e-4).sum())
        if each.rank <= count:
            assert each.top_logprobs[each.rank - 1][0] == each.token_id


@settings(
    max_examples=num_examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 90),
            st.integers(1, 30),
            st.sampled_from([None, 0, 3]),
            st.booleans(),
            st.integers(1, 2),
        ),
        min_size=1,
        max_size=5,
    ),
    name=st.sampled_from(sorted(LAYERS)),
)
def test_prompt_logprobs_equal_the_logits_in_any_batch(
    plain: LanguageModel, small: dict[str, LanguageModel], requests: Any, name: str
) -> None:
    lm = small[name]
    prompts = mixed(length for length, *_ in requests)
    params = [
        SamplingParams(max_new_tokens=new, prompt_logprobs=count, adapter="own" if own else None)
        for _, new, count, own, _ in requests
    ]
    for each, one, (*_, n) in zip(prompts, params, requests, strict=True):
        actual = lm.generate([each], one, n=n)
        assert len(actual) == n
    actual = lm.generate(prompts, params, n=2)
    for place, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        (expected,) = plain.generate([prompt], one.model_copy(update={"prompt_logprobs": None}))
        for answer in actual[2 * place : 2 * place + 2]:
            assert answer.token_ids == expected.token_ids
            if one.prompt_logprobs is None:
                assert answer.prompt_logprobs == ()
            else:
                logits = plain.logits(prompt, adapter=one.adapter)
                check(answer, logits, one.prompt_logprobs)
    assert idle(lm)


@pytest.mark.parametrize("name", ["mistral", "models/lfm2"])
def test_models_with_windows_and_states_report_prompt_logprobs(name: str, tmp_path: Path) -> None:
    key = next(each for each in CONFIGS if each.startswith(name.removeprefix("models/")))
    write_checkpoint(CONFIGS[key](), tmp_path)
    lm = load(tmp_path, "float32", cache_tokens=256, max_step_tokens=24, max_sequences=2)
    (prompt,) = mixed([70])
    (actual,) = lm.generate([prompt], max_new_tokens=2, prompt_logprobs=2)
    check(actual, lm.logits(prompt), 2)


def test_no_step_holds_the_logits_of_a_long_prompt(llama: Path) -> None:
    lm = load(llama, "float32", cache_tokens=2048)
    sizes, compute = [], lm.engine.runner.compute

    def measured(chunks: Any) -> torch.Tensor:
        logits = compute(chunks)
        sizes.append(len(logits))
        return logits

    prompts = mixed([500, 400])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.engine.runner, "compute", measured)
        actual = lm.generate(prompts, max_new_tokens=1, prompt_logprobs=0)
        assert sum(sizes) == 500 + 400
        assert max(sizes) <= 256 + 2
        sizes.clear()
        lm.generate(prompts, max_new_tokens=1)
        assert sizes == [2]
    for one, prompt in zip(actual, prompts, strict=True):
        check(one, lm.logits(prompt), 0)


def test_a_prompt_with_logprobs_shares_its_pages_with_later_ones(llama: Path) -> None:
    lm = load(llama, "float32", cache_tokens=1024, prefix_cache=True)
    (prompt,) = mixed([200])
    first, second = (lm.generate([prompt], prompt_logprobs=0)[0] for _ in range(2))
    assert first.prompt_logprobs == second.prompt_logprobs
    assert lm.engine.prefixes is not None
    assert lm.engine.prefixes.shared_tokens == 0
    lm.generate([prompt])
    assert lm.engine.prefixes.shared_tokens > 100


def test_prompts_that_are_not_predicted_are_refused(tmp_path: Path) -> None:
    written("bart", tmp_path / "bart")
    write_checkpoint(config_of("plain"), tmp_path / "mpt")
    for name, reason in (("bart", "the encoder reads"), ("mpt", "attend to later ones")):
        lm = load(tmp_path / name, "float32", cache_tokens=256)
        with pytest.raises(RequestError, match=f"prompt_logprobs is 0, but .*{reason}"):
            lm.generate([[5, 6, 7]], prompt_logprobs=0)
        assert idle(lm)
