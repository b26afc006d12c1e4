"""Adapters, workers, keys of compiled models, plugins of others and refusals, with tiny models.

``make test-vllm`` runs this in an environment with vLLM. Engines run in processes of their own.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from plugins.vllm.tests.made_plugins import install_plugins

from interposer_vllm._report import Report

Engines = Callable[..., list[dict[str, Any]]]
Started = Callable[..., subprocess.CompletedProcess[str]]

PROMPTS = [[5, 17, 99, 200, 31], [400, 401, 7, 8], [100, 22, 3, 4, 5, 6, 7, 8, 9, 10]]
TOKENS = 24
LAYERS = 2
PLACES = {
    *(
        f"model.layers.{number}.{name}"
        for number in range(LAYERS)
        for name in (
            "self_attn.qkv_proj",
            "self_attn.o_proj",
            "self_attn.attn",
            "mlp.gate_up_proj",
            "mlp.down_proj",
        )
    ),
    "lm_head",
}

# One worker starts the engines.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.xdist_group("vllm")]


def named(places: Sequence[str]) -> set[str]:
    """Return the places of layers that have a name; norms and activations have none."""
    return {place for place in places if " of " not in place}


def asked(llama: Path, **more: Any) -> dict[str, Any]:
    """Return a run; what is not an option of vLLM's is ``adapter``."""
    options = {"dtype": "float32", "enforce_eager": True, "max_num_batched_tokens": 64, **more}
    adapter = options.pop("adapter", None)
    run = {"model": str(llama), "options": options, "prompts": PROMPTS, "tokens": TOKENS}
    return run if adapter is None else {**run, "adapter": str(adapter)}


def with_adapter(llama: Path, adapter: Path) -> dict[str, Any]:
    return asked(llama, adapter=adapter, enable_lora=True, max_lora_rank=8, max_loras=1)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder where all engines keep their compiled models."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def own(run_in_vllm: Engines, llama: Path, adapter: Path, cache: Path) -> list[dict[str, Any]]:
    """Return the results of vLLM alone: with an adapter, and compiled."""
    runs = [with_adapter(llama, adapter), asked(llama, enforce_eager=False)]
    return run_in_vllm(runs, VLLM_PLUGINS="", VLLM_CACHE_ROOT=str(cache / "own"))


@pytest.fixture(scope="module")
def bridged(run_in_vllm: Engines, llama: Path, adapter: Path, cache: Path) -> list[dict[str, Any]]:
    """Return the results of vLLM with interposer's kernels for the same two runs."""
    runs = [with_adapter(llama, adapter), asked(llama, enforce_eager=False)]
    return run_in_vllm(runs, VLLM_CACHE_ROOT=str(cache / "bridged"))


def test_a_lora_adapter_works_next_to_layers_that_are_taken_over(
    own: list[dict[str, Any]], bridged: list[dict[str, Any]]
) -> None:
    for way in ("alone", "batch", "adapted", "bare"):
        assert bridged[0][way] == own[0][way]
    assert own[0]["adapted"] != own[0]["bare"] == own[0]["batch"]
    assert named(bridged[0]["report"]["taken"]) == PLACES
    assert bridged[0]["report"]["kept"] == {}


@pytest.fixture(scope="module")
def beside_others(
    run_in_vllm: Engines, llama: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Return a compiled run beside plugins of others, of which one fails and one is pinned."""
    site = install_plugins(tmp_path_factory.mktemp("others") / "made")
    policy = "linear@model.layers.1.mlp.gate_up_proj=linear_acme"
    variables = {"INTERPOSER_KERNELS": policy, "VLLM_CACHE_ROOT": str(cache / "others")}
    (found,) = run_in_vllm([asked(llama, enforce_eager=False)], LAST_PATH=str(site), **variables)
    return found


def test_other_plugins_keep_the_classes_that_they_replaced(
    own: list[dict[str, Any]], beside_others: dict[str, Any]
) -> None:
    assert beside_others["alone"] == own[1]["alone"]
    assert beside_others["batch"] == own[1]["batch"]
    report = beside_others["report"]
    replaced = {place for place in PLACES if place.endswith(("o_proj", "down_proj"))}
    assert set(report["taken"]) == PLACES - replaced
    assert report["notes"] == {"linear": "except RowParallelLinear of another plugin"}


def test_a_pinned_third_party_kernel_is_used(beside_others: dict[str, Any]) -> None:
    choices = beside_others["report"]["explanation"]["choices"]
    linear = {c["chosen"]: c for c in choices if c["name"] == "linear"}
    assert linear["linear_acme"]["places"] == ["model.layers.1.mlp.gate_up_proj"]
    assert linear["linear_acme"]["provider"] == "acme-kernels"
    fatal = {r["reason"] for c in choices for r in c["refused"] if r["candidate"] == "linear_fatal"}
    assert any("SIGABRT" in reason or "signal" in reason for reason in fatal), fatal


def test_each_set_of_choices_has_its_own_compiled_model(
    own: list[dict[str, Any]],
    bridged: list[dict[str, Any]],
    beside_others: dict[str, Any],
    cache: Path,
) -> None:
    assert bridged[1]["batch"] == own[1]["batch"]
    compiled_models = {
        name: {path.parents[1].name for path in (cache / name).rglob("rank_0_0/model")}
        for name in ("own", "bridged", "others")
    }
    assert all(len(found) == 1 for found in compiled_models.values()), compiled_models
    assert len(set.union(*compiled_models.values())) == len(compiled_models)


def test_two_workers_generate_the_same_tokens_and_report(
    own: list[dict[str, Any]], run_in_vllm: Engines, llama: Path, tmp_path: Path
) -> None:
    variables = {"TMPDIR": str(tmp_path), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    (found,) = run_in_vllm([asked(llama, tensor_parallel_size=2)], **variables)
    assert found["alone"] == own[0]["alone"]
    assert found["batch"] == own[0]["batch"]
    reports = [Report.read(path) for path in tmp_path.glob("interposer-vllm-*/worker.json")]
    assert len({report.process for report in reports}) == len(reports) == 2
    assert all(named(report.taken) == PLACES and not report.kept for report in reports)


def test_a_pin_that_cannot_be_met_ends_the_engine_with_a_reason(
    started: Started, llama: Path
) -> None:
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "INTERPOSER_KERNELS": "linear=linear_split"}
    done = started([asked(llama)], **variables)
    assert "Engine core initialization failed" in done.stdout
    said = done.stdout + done.stderr
    assert "No 'linear_split' for kernel 'linear'" in said
    assert "needs triton, which the device lacks" in said
    assert "Try: remove the pin; accepted here: " in said
