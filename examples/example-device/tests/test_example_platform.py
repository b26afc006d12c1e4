"""interposer runs models on the device, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from interposer import Config, place
from interposer_engine import load

pytestmark = [pytest.mark.process, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[3]
MODEL = ROOT / "examples" / "models" / "stdlib-lm"
PROMPTS = ["import os", "class Stack:\n    def "]
# The device has one GiB, and the cache takes a part of what the largest step leaves.
SIZE: dict[str, Any] = {"max_sequences": 2, "max_step_tokens": 128}
backend = torch.get_device_module("example")


@pytest.fixture
def no_fallback() -> Iterator[None]:
    """Let every operator that the device lacks fail."""
    allowed = backend.allow_fallback(False)
    yield
    backend.allow_fallback(allowed)


def tokens(platform: str, dtype: str = "float32", **options: Any) -> list[tuple[int, ...]]:
    lm = load(MODEL, dtype, config=Config(platform=platform), **SIZE, **options)
    return [answer.token_ids for answer in lm.generate(PROMPTS, max_new_tokens=24)]


def interposer(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command line."""
    return subprocess.run(
        [sys.executable, "-m", "interposer_tools", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )


def test_the_platform_is_chosen_on_its_machine() -> None:
    placement = place()
    assert placement.platform.name == "example"
    assert placement.device.torch_device == "example:0"
    devices = placement.platform.devices()
    assert [device.torch_device for device in devices] == ["example:0", "example:1"]
    assert placement.platform.memory("example:0").total_bytes == 1 << 30


def test_a_model_generates_the_tokens_of_the_cpu(no_fallback: None) -> None:
    assert tokens("example") == tokens("cpu")


def test_a_quantized_model_generates_the_tokens_of_the_cpu() -> None:
    pins = {"w8a16_linear": "reference"}
    on_cpu = load(
        MODEL, "float32", config=Config(platform="cpu", kernels=pins), quantization="int8", **SIZE
    )
    expected = [answer.token_ids for answer in on_cpu.generate(PROMPTS, max_new_tokens=24)]
    assert tokens("example", quantization="int8") == expected


def test_explain_names_the_device_and_a_kernel_for_each_op() -> None:
    done = interposer("explain", str(MODEL))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("device: example:0 (Example device)\n")
    assert "kernel 'rms_norm' [bfloat16 example hidden_size=256]" in done.stdout


def test_doctor_lists_the_device_and_no_problem() -> None:
    done = interposer("doctor", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["device"]["torch_device"] == "example:0"
    assert report["problems"] == []
    assert report["machine"]["devices"] == "2"


def test_without_a_device_the_platform_refuses_and_says_why() -> None:
    for variable, value, reason in (
        ("EXAMPLE_DEVICES", "0", "this process has no device"),
        ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0", "TORCH_DEVICE_BACKEND_AUTOLOAD is '0'"),
    ):
        done = interposer("doctor", INTERPOSER_PLATFORM="example", **{variable: value})
        assert done.returncode == 1
        assert reason in done.stdout, done.stdout


@pytest.mark.parametrize("op", ["rms_norm", "linear", "reshape_and_cache", "paged_attention"])
def test_the_conformance_kit_finds_torchs_kernels_correct(op: str) -> None:
    done = interposer("verify", "interposer-ops", "--platform", "example", "--op", op, "--quick")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
