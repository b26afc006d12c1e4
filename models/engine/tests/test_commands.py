"""``interposer run``, and ``interposer explain`` of a model, through the command's entry point."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from models.engine.tests.test_audio import sine, wav
from models.tests.speech_checkpoints import write_speech_model
from tests.adapter_files import write_adapter
from tests.commands import Command

from interposer import explain
from interposer.errors import ConfigError
from interposer_engine import load


def test_transcribe_writes_text_json_and_subtitles(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_speech_model(tmp_path)
    file = tmp_path / "sound.wav"
    file.write_bytes(wav(sine(440, 0.4)))
    lm = load(tmp_path, cache_tokens=256, max_sequences=1)
    settings: dict[str, Any] = {"language": "en", "temperature": 0.0}
    expected = lm.transcribe(file, **settings)
    assert expected.segments
    options = ("--language", "en", "--temperature", "0", "--cache-tokens", "256")
    written = "".join(f"{segment.text.strip()}\n" for segment in expected.segments)
    assert command("transcribe", tmp_path, file, *options)[:2] == (0, written)
    for form, text in (("srt", expected.to_srt()), ("vtt", expected.to_vtt())):
        assert command("transcribe", tmp_path, file, *options, "--format", form)[:2] == (0, text)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(file.read_bytes())))
    piped = ("transcribe", tmp_path, "-", *options, "--format", "json", "--no-timestamps")
    code, out, _ = command(*piped)
    assert code == 0
    assert json.loads(out)["text"] == lm.transcribe(file, **settings, timestamps=False).text
    code, _, err = command("transcribe", tmp_path, tmp_path / "none.wav")
    assert code == 2
    assert "none.wav' cannot be read" in err


def facts(command: Command, *arguments: str | Path) -> dict[str, Any]:
    code, out, _ = command(*arguments, "--json")
    assert code == 0
    return json.loads(out)  # type: ignore[no-any-return]


def test_run_streams_the_text_and_ends_with_measurements(command: Command, llama: Path) -> None:
    options = ("run", llama, "--prompt", "def f", "--max-new-tokens", "12")
    report = facts(command, *options)
    assert len(report["token_ids"]) == 12
    assert report["finish_reason"] == "length"
    assert 0 < report["time_to_first_token_s"] < 60
    assert report["tokens_per_second"] > 0
    assert report["peak_memory_bytes"] > 2**20
    code, out, err = command(*options)
    assert code == 0
    assert out == report["text"] + "\n"
    assert "12 tokens (length)" in err
    assert "first token after" in err
    assert "tokens/s" in err
    assert "peak memory" in err


def test_run_with_a_temperature_is_repeatable_by_seed(command: Command, llama: Path) -> None:
    options = ("run", llama, "--prompt", "x", "--temperature", "1.5", "--seed", "3")
    assert facts(command, *options)["token_ids"] == facts(command, *options)["token_ids"]


def test_run_takes_each_sampling_option(command: Command, llama: Path) -> None:
    options = ("run", llama, "--prompt", "def f", "--max-new-tokens", "12")
    greedy = facts(command, *options)
    drawn = ("--temperature", "5", "--seed", "3")
    assert facts(command, *options, *drawn)["token_ids"] != greedy["token_ids"]
    for restriction in (("--top-k", "1"), ("--top-p", "0"), ("--min-p", "1")):
        report = facts(command, *options, *drawn, *restriction)
        assert report["token_ids"] == greedy["token_ids"], restriction
    text = greedy["text"]
    report = facts(command, *options, "--stop", "\N{SNOWMAN}", "--stop", text[1:3])
    assert report["finish_reason"] == "stop"
    assert report["text"] == text[: text.index(text[1:3])]


@pytest.mark.parametrize("name", ["run", "chat"])
def test_sampling_options_are_described_as_the_parameters(command: Command, name: str) -> None:
    code, out, _ = command(name, "--help")
    assert code == 0
    words = " ".join(out.replace("│", " ").split())
    for option in ("--top-p", "--top-k", "--min-p", "--stop", "--seed", "--temperature"):
        assert f" {option} " in words
    assert "Number of likeliest tokens to draw from; 0 or -1 for all." in words


def test_run_reads_the_prompt_from_a_file_or_standard_input(
    command: Command, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "a\n\N{SNOWMAN}"
    expected = facts(command, "run", llama, "--prompt", text)["token_ids"]
    file = tmp_path / "prompt"
    for written in (text, f"{text}\n", f"{text}\r\n"):
        file.write_bytes(written.encode())
        assert facts(command, "run", llama, "--prompt-file", file)["token_ids"] == expected
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(written.encode())))
        assert facts(command, "run", llama, "--prompt", "-")["token_ids"] == expected


def test_run_refuses_a_prompt_that_is_not_utf_8(
    command: Command, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt"
    file.write_bytes(b"caf\xe9")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    for arguments in (("--prompt-file", file), ("--prompt", "-")):
        code, out, err = command("run", llama, *arguments)
        assert (code, out) == (2, "")
        assert "is no text in UTF-8: unexpected end of data at byte 3. Try: convert it" in err


def test_run_needs_a_prompt(command: Command, llama: Path) -> None:
    code, out, err = command("run", llama)
    assert (code, out) == (2, "")
    assert "--prompt-file FILE" in err


@pytest.mark.slow
def test_run_distributes_experts_among_ranks(command: Command, qwen3_moe: Path) -> None:
    options = ("run", qwen3_moe, "--prompt", "x", "--dtype", "float32", "--max-new-tokens", "6")
    output = facts(command, *options, "--tensor-parallel", "2", "--expert-parallel")["token_ids"]
    assert output == facts(command, *options)["token_ids"]


@pytest.mark.parametrize("name", [("run", "--prompt", "x"), ("chat",), ("bench",)])
def test_expert_parallel_needs_several_ranks(
    command: Command, qwen3_moe: Path, name: tuple[str, ...]
) -> None:
    first, *options = name
    code, _, err = command(first, qwen3_moe, *options, "--expert-parallel")
    assert code != 0
    assert "one process holds all experts" in err


def test_run_takes_an_adapter(command: Command, llama: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": (96, 64)})
    options = ("run", llama, "--prompt", "x", "--max-new-tokens", "8")
    output = facts(command, *options, "--adapter", folder)["token_ids"]
    lm = load(llama, cache_tokens=512)
    lm.load_adapter("own", folder)
    expected = lm.generate("x", adapter="own", max_new_tokens=8)[0].token_ids
    assert tuple(output) == expected != tuple(facts(command, *options)["token_ids"])


def test_run_speculates(command: Command, llama: Path) -> None:
    options = ("run", llama, "--prompt", "abcabcabc", "--max-new-tokens", "30")
    report = facts(command, *options, "--speculate", "ngram")
    assert report["token_ids"] == facts(command, *options)["token_ids"]
    assert 0 <= report["accepted_tokens"] <= report["drafted_tokens"]
    code, _, err = command(*options, "--speculate", llama)
    assert code == 0
    assert "draft tokens accepted" in err


def test_run_takes_dtype_platform_and_kernel(command: Command, llama: Path) -> None:
    options = ("--dtype", "bfloat16", "--platform", "cpu", "--kernel", "linear=reference")
    report = facts(command, "run", llama, "--prompt", "x", *options)
    assert len(report["token_ids"]) == 64


def test_run_quantizes_weights_while_they_load(command: Command, llama: Path) -> None:
    options = ("run", llama, "--prompt", "def f", "--max-new-tokens", "4", "--quantization")
    code, _, err = command(*options, "fp8")
    assert (code, err.count("4 tokens (length)")) == (0, 1)
    code, _, err = command(*options, "fp9")
    assert code == 2
    assert "Unknown method 'fp9' for quantization while loading" in err


def test_explain_lists_chosen_and_refused_kernels(command: Command, llama: Path) -> None:
    report = facts(command, "explain", llama, "--kernel", "rms_norm=reference")
    norms = [c for c in report["choices"] if (c["kind"], c["name"]) == ("kernel", "rms_norm")]
    assert [(c["chosen"], c["why"]) for c in norms] == [
        ("reference", "pinned by the configuration")
    ]
    assert norms[0]["provider"] == "interposer-ops"
    assert all(refused["reason"] for choice in report["choices"] for refused in choice["refused"])
    code, out, _ = command("explain", llama)
    assert code == 0
    for choice in report["choices"]:
        heading = f"{choice['kind']} {choice['name']!r}" if choice["name"] else choice["kind"]
        assert f"\n{heading}" in out


def test_explain_selects_kernels_for_a_described_device(
    command: Command, llama: Path, tmp_path: Path
) -> None:
    def linears(*arguments: str | Path) -> list[dict[str, Any]]:
        choices = facts(command, "explain", llama, "--dtype", "float32", *arguments)["choices"]
        return [c for c in choices if (c["kind"], c["name"]) == ("kernel", "linear")]

    for choice in linears("--on", "graviton4"):
        reasons = {refused["candidate"]: refused["reason"] for refused in choice["refused"]}
        assert reasons["linear_packed"] == "needs x86_64, the device is aarch64"
    assert all(choice["chosen"] == "linear_native" for choice in linears("--on", "graviton4"))
    description = tmp_path / "here.json"
    assert command("doctor", "--describe", description)[0] == 0
    choices = [(c["chosen"], c["places"]) for c in linears("--on", description)]
    assert choices == [(c["chosen"], c["places"]) for c in linears()]


def test_explain_plans_online_quantization(command: Command, llama: Path) -> None:
    def places(report: dict[str, Any]) -> set[str]:
        chosen = [
            c for c in report["choices"] if (c["kind"], c["name"]) == ("kernel", "fp8_linear")
        ]
        return {place for choice in chosen for place in choice["places"]}

    assert places(facts(command, "explain", llama)) == set()
    report = facts(command, "explain", llama, "--quantization", "fp8")
    assert "model.layers.1.mlp.down_proj" in places(report)
    lm = load(llama, cache_tokens=64, quantization="fp8")
    explanation = explain(lm)
    assert places(explanation.to_dict()) == places(report)
    # The directory and the loaded model are planned alike for a machine that is not there.
    far = command("explain", llama, "--quantization", "fp8", "--on", "graviton4")
    assert far[0] == 0
    assert places(explain(lm, device="graviton4").to_dict()) == places(report)
    settings = {"quant_method": "fp8", "modules_to_not_convert": ["down_proj"]}
    less = places(explain(llama, quantization=settings).to_dict())
    assert less == {place for place in places(report) if not place.endswith("down_proj")}
    code, out, err = command("explain", llama, "--quantization", "fp9")
    assert (code, out) == (2, "")
    assert "Unknown method 'fp9' for quantization while loading" in err
    code, out, err = command("explain", "--quantization", "fp8")
    assert (code, out) == (2, "")
    assert "quantization='fp8' is about a model, and none is given" in err
    with pytest.raises(ConfigError, match="takes no quantization for a loaded model"):
        explain(lm, quantization="fp8")


def test_why_lists_the_layers_that_use_one_op(command: Command, llama: Path) -> None:
    report = facts(command, "explain", llama, "--why", "rms_norm")
    assert {choice["name"] for choice in report["choices"]} == {"rms_norm"}
    code, out, _ = command("explain", llama, "--why", "rms_norm")
    assert code == 0
    assert all(place in out for choice in report["choices"] for place in choice["places"])
    report = facts(command, "explain", llama, "--why", "gelu_and_mul")
    assert report["notes"] == ["the model does not request 'gelu_and_mul'"]
    assert [subject["name"] for subject in report["candidates"]] == ["gelu_and_mul"]


def test_run_takes_locked(
    command: Command, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command("run", llama, "--prompt", "x", "--locked")
    assert (code, out) == (1, "")
    assert "interposer.lock" in err


def test_explain_needs_no_weights(command: Command, copied: Path) -> None:
    (copied / "model.safetensors").write_bytes(b"")
    assert facts(command, "explain", copied)["choices"]


@pytest.mark.landing(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernel", "rms_norm"), "not of the form NAME=CHOICE"),
        (("--kernel", "rms_nrom=reference"), "nearest first: 'rms_norm'"),
        (("--kernel", "rms_norm=refrence"), "nearest first: 'reference'"),
        (("--kernel", "linear@model.layer.*=reference"), "matches no place"),
        (("--kernel", "gelu_and_mul@*=reference"), "this model does not request 'gelu_and_mul'"),
        (("--platform", "abacus"), "Unknown platform"),
        (("--dtype", "float17"), "Unknown dtype 'float17'"),
    ],
)
def test_a_bad_option_ends_with_one_message(
    command: Command, llama: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = command("explain", llama, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.landing(6)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", ""), "prompt is empty"),
        (("--prompt", "x", "--temperature", "-1"), "temperature"),
        (("--prompt", "x", "--temperature", "nan"), "temperature"),
        (("--prompt", "x", "--top-p", "2"), "top_p is 2.0; allowed is a number from 0 to 1"),
        (("--prompt", "x", "--min-p", "-1"), "min_p is -1.0; allowed is a number from 0 to 1"),
        (("--prompt", "x", "--top-k", "-2"), "top_k is -2; allowed is 0 or -1, which keep all tok"),
        (("--prompt", "x", "--stop", ""), "allowed is a list or tuple of texts that are not"),
        (("--prompt", "x", "--max-new-tokens", "0"), "max_new_tokens"),
        (("--prompt", "x", "--prompt-file", "y"), "both give the prompt. Try: only one"),
        (("--prompt-file", "none.txt"), "--prompt-file none.txt cannot be read: No such file"),
        (("--prompt-file", "."), "--prompt-file . cannot be read: Is a directory"),
    ],
)
def test_a_bad_request_ends_with_one_message(
    command: Command, llama: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = command("run", llama, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_a_missing_directory_ends_with_one_message(command: Command, tmp_path: Path) -> None:
    code, _, err = command("run", tmp_path / "none", "--prompt", "x")
    assert code == 1
    assert err == (
        f"error: {tmp_path / 'none'}: does not exist\n"
        "Try: give the folder of a model, or its name on a hub, such as Qwen/Qwen3-0.6B\n"
    )


def test_run_reports_whether_context_or_limit_ended_the_text(
    command: Command, copied: Path
) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    code, _, err = command("run", copied, "--prompt", "x", "--max-new-tokens", "99")
    assert code == 0
    assert "tokens (length: the context of 8 is full)" in err
