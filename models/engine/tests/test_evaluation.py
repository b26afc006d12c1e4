"""``interposer eval`` hands a model and the options of lm_eval to lm_eval."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from tests.commands import Command

from interposer.errors import RequestError
from interposer_engine import TextTokenizer
from interposer_engine._commands import evaluate
from interposer_engine.parts import MissingTokenizer

SHIPPED = Path(__file__).parents[3] / "examples" / "models" / "stdlib-lm"


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], list[str]]]:
    """The arguments of each run, which ends at once."""
    called: list[tuple[dict[str, Any], list[str]]] = []
    monkeypatch.setattr(evaluate, "run", lambda *arguments: called.append(arguments))
    return called


def test_a_model_without_options_is_loaded_with_the_defaults(
    command: Command, runs: list[Any]
) -> None:
    assert command("eval", "MODEL", "--tasks", "a,b")[0] == 0
    assert runs == [({"pretrained": "MODEL"}, ["--tasks", "a,b"])]


def test_options_of_load_and_of_lm_eval_may_be_mixed(command: Command, runs: list[Any]) -> None:
    options = ["--tasks", "a", "b", "--quantization", "int8", "--limit", "5", "--log_samples"]
    more = ["--kernel", "linear=reference", "--kernel", "rms_norm=-x", "--max-length", "64", "-f=2"]
    assert command("eval", "MODEL", *options, *more, "--dtype", "float32")[0] == 0
    ((arguments, rest),) = runs
    assert arguments == {
        "pretrained": "MODEL",
        "dtype": "float32",
        "quantization": "int8",
        "kernel": ["linear=reference", "rms_norm=-x"],
        "max_length": 64,
    }
    assert rest == ["--tasks", "a", "b", "--limit", "5", "--log_samples", "-f=2"]


def test_the_model_comes_first(command: Command, runs: list[Any]) -> None:
    code, _, err = command("eval", "--tasks", "a", "MODEL")
    assert code == 2
    assert "--tasks stands before the model. Try: interposer eval MODEL" in err
    assert not runs


def test_a_missing_lm_eval_is_explained(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    code, _, err = command("eval", SHIPPED, "--tasks", "a")
    assert code == 2
    assert "Try: pip install 'interposer-engine[eval]'" in err


def test_lm_eval_can_find_the_backend() -> None:
    (point,) = entry_points(group="lm_eval.models", name="interposer")
    assert point.value == "interposer_engine.evaluation:InterposerLM"


def test_a_tokenizer_of_transformers_gives_the_same_tokens() -> None:
    tokenizer = TextTokenizer(SHIPPED)
    text = "def f(x):\n    return x"
    assert tokenizer.transformers_tokenizer.encode(text) == tokenizer.encode(text)
    assert tokenizer.transformers_tokenizer.eos_token_id == 0


def test_a_missing_tokenizer_cannot_be_converted(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"holds no tokenizer\. Try: add the tokenizer\.json"):
        _ = MissingTokenizer(tmp_path).transformers_tokenizer
