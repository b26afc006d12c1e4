"""The catalogue of ops as text, as JSON and as a page."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from interposer import Case, Kernel, OpEntry, Registry, custom_op
from interposer.errors import UnknownNameError
from interposer.hookspecs import hookimpl
from interposer.tooling import Plugins
from interposer_testing.cases import Axis, CaseSpace, Point
from interposer_tools._op_catalogue import OpCatalogue


def build(point: Point, dtype: torch.dtype, _: torch.Generator) -> Case:
    return Case("", {"x": torch.ones(point["rows"], 4, dtype=dtype)})


@custom_op(
    "negated",
    cases=CaseSpace(build, Axis("rows", {"one": 1, "two": 2}), dtypes=(torch.float32,)),
    batched=("x",),
)
def negated(x: torch.Tensor) -> torch.Tensor:
    """Return ``-x``.

    y = -x

    Args:
        x: ``[T, H]``, any float dtype,
            dense.
    Returns: shape of ``x``.
    Source: arithmetic.
    """
    return -x


def registry() -> Registry:
    records = [
        OpEntry("negated", f"{__name__}:negated", frozenset({"traceable"})),
        Kernel("negated", "negated_fast", f"{__name__}:negated", platform="moon"),
    ]
    plugin = SimpleNamespace(__name__="signs", interposer_records=hookimpl(lambda: records))
    return Registry(Plugins.of(plugin))


def test_facts_match_the_definition_of_the_op() -> None:
    (facts,) = OpCatalogue.of(registry()).ops
    assert facts.schema == "negated(Tensor x) -> Tensor"
    assert (facts.cases, facts.dtypes, facts.batched) == (2, ("float32",), ("x",))
    assert facts.kernels == ("signs/negated_fast",)
    assert facts.properties == ("traceable",)


def test_one_op_is_shown_in_full() -> None:
    text = str(OpCatalogue.of(registry(), ["negated"]))
    assert "``[T, H]``, any float dtype," in text
    assert "cases: 2" in text


def test_the_page_has_sections_and_lists() -> None:
    page = OpCatalogue.of(registry()).to_markdown()
    assert "### `negated`\n\n`negated(Tensor x) -> Tensor`\n\nReturn ``-x``.\n" in page
    assert "**Args**\n\n- `x`: ``[T, H]``, any float dtype,\n        dense.\n\n" in page
    assert "**Source** arithmetic." in page
    assert "2 cases in float32." in page
    assert "\n\n\n" not in page


def test_an_unknown_op_suggests_the_nearest_name() -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown op 'negate'.*'negated'"):
        OpCatalogue.of(registry(), ["negate"])
