"""A report holds what a worker took over, and says the same as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from interposer import Config, Verdict
from interposer.errors import ConfigError, StorageError
from interposer_ops.linear import linear
from interposer_vllm._patching import VERDICTS
from interposer_vllm._report import Report
from interposer_vllm._session import Session

pytestmark = pytest.mark.process


@pytest.fixture
def session(no_policy: None) -> Session:
    new_session = Session("cpu", Config(kernels={"linear": "reference"}))
    site = new_session.site("model.layers.0.mlp.down_proj", torch.float32)
    site.bind_kernel(linear, in_features=8, out_features=4, biased=False)
    new_session.taken.append("model.layers.0.mlp.down_proj")
    for number in range(5):
        new_session.kept[f"model.layers.{number}.self_attn.kv_b_proj"] = (
            "vLLM reads its weight outside of its method"
        )
    return new_session


def test_a_written_report_reads_back_equal(session: Session) -> None:
    report = Report.of(session)
    path = report.write()
    assert Report.read(path) == report
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(report.to_json())
    assert path.stat().st_mode & 0o077 == 0 or path.parent.stat().st_mode & 0o077 == 0


def test_the_text_names_choices_and_reasons(session: Session) -> None:
    text = str(Report.of(session))
    for part in (
        "layers on kernels of interposer: 1",
        "layers that stay vLLM's own: 5",
        "model.layers.0.self_attn.kv_b_proj",
        "and 2 more: vLLM reads its weight outside of its method",
        "kernel linear float32",
        "reference (interposer-ops): pinned",
    ):
        assert part in text


def test_the_report_explains_choices_as_interposer_explain_does(session: Session) -> None:
    (choice,) = (
        choice for choice in Report.of(session).explanation["choices"] if choice["name"] == "linear"
    )
    assert choice["chosen"] == "reference"
    assert choice["places"] == ["model.layers.0.mlp.down_proj"]
    assert choice["refused"]


@pytest.mark.parametrize("content", ["", "[]", '{"version": 99}', "{}"])
def test_an_invalid_report_is_refused_with_its_path(content: str, tmp_path: Path) -> None:
    path = tmp_path / "worker.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(StorageError, match=r"worker\.json"):
        Report.read(path)


def test_a_configured_kv_cache_is_refused(no_policy: None) -> None:
    with pytest.raises(ConfigError, match="Try: vLLM's option kv_cache_dtype"):
        Session("cpu", Config(kv_cache="int4"))


def test_a_platform_for_other_hardware_is_refused(no_policy: None) -> None:
    with pytest.raises(ConfigError, match="vLLM computes on 'cuda'"):
        Session("cuda", Config(platform="cpu"))


def test_report_names_the_classes_of_another_plugin(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = "except RowParallelLinear of another plugin"
    monkeypatch.setitem(VERDICTS, "linear", Verdict.accept(note))
    monkeypatch.setitem(VERDICTS, "head", Verdict.refuse("it moved"))
    monkeypatch.setitem(VERDICTS, "attention", Verdict.accept())
    text = str(Report.of(session))
    for line in (f"  linear: applied {note}", "  head: it moved", "  attention: applied"):
        assert line in text.splitlines()


def test_layers_of_equal_names_are_counted_once(session: Session) -> None:
    session.taken *= 2
    assert Report.of(session).taken == ["model.layers.0.mlp.down_proj"]
