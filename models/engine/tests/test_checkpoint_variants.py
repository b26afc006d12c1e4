"""Whatever a checkpoint or adapter states, it is computed as transformers and PEFT do, or refused.

``variants`` holds the spellings; ``make test-checkpoints`` compares thousands.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from models.engine.tests.variants import compare_adapters
from models.engine.tests.variants.compare import (
    Comparison,
    Differences,
    compare,
    differences_of_adapt,
    differences_of_load,
)
from models.tests.family_checkpoints import family_configs, write_config
from transformers.utils import logging

from interposer.errors import CheckpointError
from interposer_engine import plan


def find_faults(first: int, end: int, differences: Differences) -> list[str]:
    return faults_of(compare(first, end, differences))


def faults_of(comparisons: Iterator[Comparison]) -> list[str]:
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about fields that it does not know
        compared = [*comparisons]
    assert sum(one.outcome.kind == "equal" for one in compared) > len(compared) / 4
    return [str(one) for one in compared if one.outcome.is_fault]


@pytest.mark.landing(1)
@pytest.mark.parametrize("first", range(0, 100, 25))
def test_a_loaded_model_is_that_of_transformers(first: int) -> None:
    assert find_faults(first, first + 25, differences_of_load) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 2000, 100))
def test_two_thousand_loaded_models_equal_transformers(first: int) -> None:
    assert find_faults(first, first + 100, differences_of_load) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 500, 100))
def test_five_hundred_adapted_models_keep_their_results(first: int) -> None:
    assert find_faults(first, first + 100, differences_of_adapt) == []


def test_adapters_equal_peft() -> None:
    assert faults_of(compare_adapters.compare(0, 6)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6, 500, 124))
def test_five_hundred_adapters_equal_peft(first: int) -> None:
    assert faults_of(compare_adapters.compare(first, first + 124)) == []


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("opt", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}, "layer_types"),
        ("mistral", {"sliding_window": 8, "layer_types": ["full_attention"] * 3}, "layer_types"),
        ("lfm2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("falcon_h1", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gpt_neox", {"rope_theta": 1000}, "rope_theta"),
    ],
)
def test_fields_that_an_architecture_does_not_read(
    family: str, changes: dict[str, Any], field: str, tmp_path: Path
) -> None:
    config = next(config for name, config in family_configs() if name.startswith(f"{family}-"))
    write_config(tmp_path, {**config, "num_hidden_layers": 3, **changes})
    with pytest.raises(CheckpointError, match=f"{field} is .*this architecture does not read it"):
        plan(tmp_path, platform="cpu")


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen2_moe", "qwen3_moe"])
def test_windows_that_are_switched_off_are_in_no_layer(family: str, tmp_path: Path) -> None:
    config = next(config for name, config in family_configs() if name.startswith(f"{family}-"))
    kinds = ["sliding_attention", *["full_attention"] * (config["num_hidden_layers"] - 1)]
    changes = {"use_sliding_window": False, "sliding_window": 8, "layer_types": kinds}
    write_config(tmp_path, {**config, **changes})
    with pytest.raises(CheckpointError, match=r"layer_types has sliding .* use_sliding_window is"):
        plan(tmp_path, platform="cpu")
