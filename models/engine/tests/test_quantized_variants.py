"""Whatever files state of a quantization, the model is that of a reference, or it is refused.

``variants/quantization_variations.py`` holds the spellings; ``make test-checkpoints`` compares
thousands.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from models.engine.tests.variants.compare import PROMPT, relative_difference
from models.engine.tests.variants.quantization_variations import KINDS
from models.engine.tests.variants.quantized_files import base, compare
from transformers.utils import logging

from interposer.errors import CheckpointError, ConfigError, UnknownNameError
from interposer_engine import LanguageModel, load

AWQ_FILE = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
GPTQ_FILE = {
    **{"bits": 4, "group_size": 32, "damp_percent": 0.01, "desc_act": False, "sym": True},
    **{"static_groups": False, "true_sequential": True, "model_file_base_name": "model"},
}


def find_faults(first: int, end: int) -> list[str]:
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about settings that it does not know
        compared = [*compare(first, end)]
    assert sum(one.outcome.kind == "equal" for one in compared) > len(compared) / 4
    return [str(one) for one in compared if one.outcome.is_fault]


def loaded(folder: Path) -> LanguageModel:
    return load(folder, "float32", platform="cpu", cache_tokens=128, max_sequences=1)


def written(path: Path, kind: str, settings: Any, **beside: Any) -> Path:
    """Copy the checkpoint of a kind with other settings of its quantization, and other files."""
    source, config, _ = base(kind)
    path.mkdir()
    shutil.copy(source / "model.safetensors", path)
    if settings is not None:
        config = {**config, "quantization_config": settings}
    for name, content in {"config": config, **beside}.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_quantized_model_is_that_of_a_reference() -> None:
    assert find_faults(0, len(KINDS)) == []


@pytest.mark.slow
@pytest.mark.parametrize("first", range(len(KINDS), 635, 100))
def test_six_hundred_quantized_models_equal_their_references(first: int) -> None:
    assert find_faults(first, first + 100) == []


@pytest.mark.parametrize(
    ("kind", "name", "content"),
    [("awq", "quant_config", AWQ_FILE), ("gptq", "quantize_config", GPTQ_FILE)],
)
def test_the_file_of_the_writer_counts_where_config_json_states_nothing(
    kind: str, name: str, content: dict[str, Any], tmp_path: Path
) -> None:
    alone = loaded(written(tmp_path / "alone", kind, None, **{name: content}))
    assert relative_difference(alone.logits(PROMPT), base(kind)[2]) < KINDS[kind].bound
    other = {name: {"bits": 3, "zero_point": True}}
    beside = loaded(written(tmp_path / "beside", kind, KINDS[kind].settings, **other))
    assert relative_difference(beside.logits(PROMPT), base(kind)[2]) < KINDS[kind].bound


def test_two_names_of_a_field_must_agree(tmp_path: Path) -> None:
    settings = {**KINDS["awq"].settings, "w_bit": 4, "q_group_size": 64}
    path = written(tmp_path / "m", "awq", settings)
    with pytest.raises(ConfigError, match=r"config\.json: .*group_size 32 and q_group_size 64"):
        load(path)


def test_a_checkpoint_names_its_method(tmp_path: Path) -> None:
    early = {"load_in_8bit": True, "llm_int8_threshold": 6.0}
    lm = loaded(written(tmp_path / "early", "LLM.int8", early))
    assert relative_difference(lm.logits(PROMPT), base("LLM.int8")[2]) < KINDS["LLM.int8"].bound
    unnamed = written(tmp_path / "unnamed", "gptq", {"bits": 4})
    with pytest.raises(CheckpointError, match=r"without a quant_method in its config\.json"):
        load(unnamed)


def test_how_transformers_runs_layers_changes_nothing(tmp_path: Path) -> None:
    settings = {**KINDS["W4A16"].settings, "run_compressed": True, "dequantize": False}
    lm = loaded(written(tmp_path / "m", "W4A16", settings))
    assert relative_difference(lm.logits(PROMPT), base("W4A16")[2]) < KINDS["W4A16"].bound


@pytest.mark.parametrize(
    ("changes", "error", "reason"),
    [
        ({"bits": 3}, ConfigError, r"m/config\.json: The quantization of .*\n  .*\.bits = 3"),
        ({"w_bit": 4}, UnknownNameError, r"'w_bit' in quantization_config of .*m/config\.json"),
        ({"quant_method": "hqqq"}, UnknownNameError, r"in quantization_config of .*config\.json"),
    ],
)
def test_refused_settings_name_the_file(
    changes: dict[str, Any], error: type[ConfigError], reason: str, tmp_path: Path
) -> None:
    path = written(tmp_path / "m", "gptq", {**KINDS["gptq"].settings, **changes})
    with pytest.raises(error, match=reason):
        load(path)


@pytest.mark.parametrize("kind", ["LLM.int8", "mxfp4", "fp8 of AutoFP8, static"])
def test_quantized_tensors_without_settings_name_the_cause(kind: str, tmp_path: Path) -> None:
    path = written(tmp_path / "m", kind, None)
    with pytest.raises(CheckpointError, match="state no such quantization of that layer"):
        loaded(path)
