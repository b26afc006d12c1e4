"""Each sampling parameter is on the pages that list them, and marked as the pages say."""

from __future__ import annotations

import re
from pathlib import Path

from interposer_engine import SamplingParams
from interposer_engine._sampling_fields import Suggested
from interposer_engine._sampling_params import marked_fields

DOCS = Path(__file__).parents[3] / "docs"


def quoted(text: str) -> list[str]:
    return re.findall(r"`([a-z_]+)[^`]*`", text)


def between(page: str, start: str, end: str) -> str:
    return (DOCS / page).read_text().split(start)[1].split(end)[0]


def test_the_docstring_describes_each_parameter() -> None:
    described = re.findall(r"^ {4,8}(\w+): ", SamplingParams.__doc__ or "", re.M)
    assert set(SamplingParams.model_fields) <= {*described}


def test_the_table_of_parameters_has_each_parameter_once() -> None:
    section = between("run-a-model.md", "\n## Sampling parameters\n", "\n## ")
    cells = re.findall(r"^\|([^|]+)\|", section, re.M)
    listed = [name for cell in cells for name in quoted(cell)]
    assert sorted(listed) == sorted(SamplingParams.model_fields)


def test_the_page_of_models_lists_each_parameter_that_a_checkpoint_may_suggest() -> None:
    sampled, greedy, _ = between("models.md", "\n| suggested sampling", "\n").split(";")
    suggested = marked_fields(Suggested)
    assert quoted(sampled.split("`do_sample`")[1]) == [
        name for name, marker in suggested.items() if not marker.for_greedy
    ]
    assert quoted(greedy) == [name for name, marker in suggested.items() if marker.for_greedy]
