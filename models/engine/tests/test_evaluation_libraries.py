"""The backend of lm_eval gives the results of lm_eval's own backend for transformers.

`make test-libraries` installs lm_eval.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from models.conftest import write_checkpoint
from models.engine.tests.test_bad_checkpoints import edit_json
from models.engine.tests.test_prefix_lm import config_of
from models.tests.test_encoder_decoder import written

from interposer.errors import ConfigError, RequestError, UnknownNameError
from interposer_engine import load

pytest.importorskip("lm_eval", reason="needs lm_eval. Try: make test-libraries")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.xdist_group("lm_eval"),
    # Warnings of lm_eval and of the libraries that it imports.
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "examples" / "models" / "stdlib-lm"
PAGE = ROOT / "docs" / "evaluate.md"
SOURCE = Path(json.__file__).read_text(encoding="utf-8")
CONTEXT = 1024
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{before}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "completion": {
        "output_type": "generate_until",
        "doc_to_text": "{{before}}",
        "doc_to_target": "{{after}}",
        "generation_kwargs": {"until": ["\n\n", ":"], "max_gen_toks": 24},
        "metric_list": [{"metric": "exact_match"}],
    },
    "text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{after}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
}


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]


def backends(path: Path, **options: Any) -> tuple[Any, Any]:
    """Return a model as a backend of the engine, and of transformers."""
    from lm_eval.models.huggingface import HFLM

    from interposer_engine.evaluation import InterposerLM

    sizes: dict[str, Any] = {
        "max_sequences": 4,
        "cache_tokens": 4 * CONTEXT,
        "max_step_tokens": 256,
    }
    ours = InterposerLM(path, dtype="float32", **sizes, **options)
    return ours, HFLM(str(path), dtype="float32", device="cpu", batch_size=3, **options)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    return backends(SHIPPED)


def check_scores(pair: tuple[Any, Any], kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    requests = instances(kind, *arguments)
    actual, expected = (getattr(each, kind)(requests) for each in pair)
    assert len(actual) == len(expected) == len(arguments)
    for ours, theirs in zip(actual, expected, strict=True):
        if kind == "loglikelihood":
            assert ours[0] == pytest.approx(theirs[0], abs=1e-3)
            assert ours[1] == theirs[1]
        else:
            assert ours == pytest.approx(theirs, abs=1e-3 if theirs > -1e3 else 1e-2)
    return list(actual)


def write_tasks(folder: Path) -> None:
    places = [SOURCE[start : start + 600] for start in range(0, 6000, 600)]
    rows = [
        {
            "before": text[:300],
            "after": text[300:],
            "choices": [text[300:320], other[300:320], " x", " y"],
            "right": 0,
        }
        for text, other in zip(places, [*places[1:], places[0]], strict=True)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    source = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.json")}},
        "test_split": "test",
        "target_delimiter": "",
    }
    for name, settings in TASKS.items():
        task = {"task": f"own_{name}", **source, **settings}
        (folder / f"{name}.yaml").write_text(json.dumps(task))


def test_tasks_have_the_results_of_transformers(pair: tuple[Any, Any], tmp_path: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    write_tasks(tmp_path)
    names = [f"own_{name}" for name in TASKS]
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    ours, theirs = (
        simple_evaluate(model=each, tasks=names, task_manager=tasks, log_samples=True)
        for each in pair
    )
    for name in names:
        figures = {key: value for key, value in theirs["results"][name].items() if "," in key}
        assert len(figures) >= 2
        for key, value in figures.items():
            assert ours["results"][name][key] == (
                value if isinstance(value, str) else pytest.approx(value, rel=1e-5)
            )
    for ours_sample, theirs_sample in zip(
        ours["samples"]["own_completion"], theirs["samples"]["own_completion"], strict=True
    ):
        assert ours_sample["resps"] == theirs_sample["resps"]


def test_continuations_have_the_scores_of_transformers(pair: tuple[Any, Any]) -> None:
    scores = check_scores(
        pair,
        "loglikelihood",
        ("import os", " as"),
        ("import os", "\n"),
        ("import os", " path and much more"),
        ("import sys ", "x"),
        ("", "import"),
        ("<|endoftext|>import", " os"),
        (SOURCE, "\n"),
        (SOURCE, SOURCE[:2000]),
    )
    assert {is_greedy for _, is_greedy in scores} == {True, False}


@pytest.mark.parametrize("excess", [-3, -2, -1, 0, 1, 2])
def test_contexts_about_as_long_as_the_window(pair: tuple[Any, Any], excess: int) -> None:
    tokens = pair[0].tok_encode(SOURCE)
    for num_continuation in (1, 5):
        context = tokens[: CONTEXT + excess - num_continuation]
        # One by one: lm_eval 0.4.13 takes logits of another token for the shorter one of two
        # continuations that end at the same place.
        request = (None, context, tokens[len(context) :][:num_continuation])
        ((ours, ours_greedy),), ((theirs, theirs_greedy),) = (
            each._loglikelihood_tokens([request]) for each in pair
        )
        assert ours == pytest.approx(theirs, abs=1e-3)
        assert ours_greedy == theirs_greedy


def test_continuations_that_end_at_the_same_place(pair: tuple[Any, Any]) -> None:
    tokens = pair[0].tok_encode(SOURCE)[:60]
    requests = [(None, tokens[:split], tokens[split:]) for split in (59, 58, 50)]
    lm = pair[0].language_model
    scores = pair[0]._loglikelihood_tokens(requests)
    for (_, context, continuation), (logprob, _) in zip(requests, scores, strict=True):
        (expected,) = lm.score(context, [continuation])
        assert logprob == pytest.approx(sum(expected), abs=1e-3)


def test_choices_of_one_token(pair: tuple[Any, Any]) -> None:
    """Likely ones come from one step for all of them, unlikely ones are scored alone."""
    tails = ["\n", " as", ",", ".", "q", "Z"]
    contexts = ["import os", SOURCE, "class A"]
    requests = [(context, tail) for context in contexts for tail in tails]
    check_scores(pair, "loglikelihood", *requests)


@pytest.mark.parametrize("max_length", [None, 100])
def test_long_texts_have_the_scores_of_transformers(max_length: int | None) -> None:
    pair = backends(SHIPPED, max_length=max_length)
    check_scores(pair, "loglikelihood_rolling", (SOURCE[:9000],), ("x",), (SOURCE[:500],))


@pytest.mark.parametrize(
    "settings",
    [
        {"until": ["\n\n"], "max_gen_toks": 40},
        {"until": "\n", "max_gen_toks": 8, "do_sample": False, "temperature": 0.0},
        {"until": [], "max_new_tokens": 30, "num_beams": 1},
        {"until": ["import", "os"], "max_gen_toks": 30, "repetition_penalty": 1.3},
    ],
)
def test_greedy_answers_are_those_of_transformers(
    pair: tuple[Any, Any], settings: dict[str, Any]
) -> None:
    contexts = ["import os", "class A:", "def read(self", SOURCE[:9000], SOURCE[:2000]]
    requests = instances("generate_until", *((context, settings) for context in contexts))
    # transformers pads the shorter prompts of a batch, which can change the likeliest token.
    pair[1].batch_size_per_gpu = 1
    actual, expected = (each.generate_until(requests) for each in pair)
    assert actual == expected


def test_samples_depend_on_the_place_and_the_seed() -> None:
    from interposer_engine.evaluation import InterposerLM

    settings = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    requests = instances("generate_until", *[("import os", settings)] * 3)
    lm = load(SHIPPED, dtype="float32")
    answers = [InterposerLM(lm, seed=seed).generate_until(requests) for seed in (1, 1, 2)]
    assert answers[0] == answers[1]
    assert len({*answers[0], *answers[2]}) > 3


def test_chats_are_those_of_transformers(pair: tuple[Any, Any]) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    ours, theirs = pair
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tokenizer_name == theirs.tokenizer_name


@pytest.mark.parametrize("add_bos_token", [None, True, False])
def test_tokens_are_those_of_transformers(add_bos_token: bool | None) -> None:
    ours, theirs = backends(SHIPPED, add_bos_token=add_bos_token)
    for text in ("import os", "<|endoftext|>import os", "", " "):
        assert ours.tok_encode(text) == theirs.tok_encode(text)
        plain = {"add_special_tokens": False}
        assert ours.tok_encode(text, **plain) == theirs.tok_encode(text, **plain)


def test_a_model_with_an_encoder(tmp_path: Path) -> None:
    written("bart", tmp_path)
    edit_json(tmp_path / "config.json", model_type="bart")
    tokens = {"bos_token": "!", "eos_token": "~", "pad_token": "#"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    pair = backends(tmp_path, max_length=48)
    check_scores(pair, "loglikelihood", ("abc", "de"), ("a", "b"), ("abc" * 40, "x y"))
    check_scores(pair, "loglikelihood_rolling", ("some text",))


def test_a_prefix_lm_reads_the_context_in_both_directions(tmp_path: Path) -> None:
    from interposer_engine.evaluation import InterposerLM

    write_checkpoint(config_of("plain"), tmp_path)
    lm = load(tmp_path, dtype="float32")
    context, continuation = [5, 6, 7, 8], [9, 10]
    ((logprob, _),) = InterposerLM(lm)._loglikelihood_tokens([(None, context, continuation)])
    (expected,) = lm.score(context, [continuation])
    assert logprob == pytest.approx(sum(expected), abs=1e-4)


def test_unusable_arguments_are_refused() -> None:
    from interposer_engine.evaluation import InterposerLM

    lm = load(SHIPPED, dtype="float32", cache_tokens=CONTEXT)
    with pytest.raises(UnknownNameError, match="Unknown model argument 'quantisation'"):
        InterposerLM(SHIPPED, quantisation="int8")
    with pytest.raises(ConfigError, match="Exactly one of path and pretrained"):
        InterposerLM()
    with pytest.raises(ConfigError, match="max_length is 1025, must be from 1 to 1024"):
        InterposerLM(lm, max_length=1025)
    for name, value in {"dtype": "float32", "kernel": ["a=b"], "tensor_parallel": 2}.items():
        settings: dict[str, Any] = {name: value}
        with pytest.raises(ConfigError, match=f"{name} is set when a model is loaded"):
            InterposerLM(lm, **settings)
    with pytest.raises(ConfigError, match="enable_thinking needs"):
        InterposerLM(lm, enable_thinking=True)
    with pytest.raises(RequestError, match="num_beams is 4, which has no equivalent"):
        generated(lm, {"until": [], "num_beams": 4})
    with pytest.raises(RequestError, match="1024 new tokens leave no space for a context"):
        generated(lm, {"until": [], "max_gen_toks": 1024})
    with pytest.raises(RequestError, match="A continuation of 0 tokens after 3"):
        InterposerLM(lm).loglikelihood(instances("loglikelihood", ("import os", "")))


def generated(lm: Any, settings: dict[str, Any]) -> list[str]:
    from interposer_engine.evaluation import InterposerLM

    answers = InterposerLM(lm).generate_until(instances("generate_until", ("a", settings)))
    return list(answers)


def evaluate(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "interposer_tools", "eval", str(SHIPPED), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [(), ("--tensor-parallel", "2")])
def test_the_command_writes_the_results_of_lm_eval(tmp_path: Path, options: Sequence[str]) -> None:
    write_tasks(tmp_path)
    paths = ("--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"))
    table = evaluate(
        tmp_path,
        "--tasks",
        "own_choice",
        "--quantization",
        "int8",
        "--limit",
        "4",
        *paths,
        *options,
    )
    assert "own_choice" in table
    (file,) = tmp_path.glob("out/**/*.json")
    found = json.loads(file.read_text())
    assert found["config"]["model_args"]["quantization"] == "int8"
    assert found["config"]["model_quantization"] == "int8"
    assert any(kernel.startswith("int8_linear: ") for kernel in found["config"]["model_kernels"])


def test_the_task_of_the_page_runs(tmp_path: Path) -> None:
    blocks = re.findall(
        r"<!-- file: (\S+) -->\n+```\w+\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    for name, text in blocks:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (line,) = re.findall(r"^interposer eval \S+ (.*--include_path.*)$", PAGE.read_text(), re.M)
    assert "acc" in evaluate(tmp_path, *line.split())


def test_lm_eval_finds_the_backend_by_name() -> None:
    from lm_eval.api.registry import get_model

    from interposer_engine.evaluation import NAME, InterposerLM

    assert get_model(NAME) is InterposerLM
    assert get_model("dummy").__name__ == "DummyLM"
