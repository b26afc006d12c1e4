"""Backends with a method for each combination of scales and sinks work through ``forward``."""

from __future__ import annotations

from abc import ABCMeta
from typing import Any

import pytest
import torch

from interposer import AttentionBackend, AttentionSpec, Capability, KVCacheLayout, Verdict
from interposer.errors import MissingMemberError

STEP = ("query", "key", "value", "cache", "plan")


class Plain(AttentionBackend):
    """A backend whose ``forward`` takes no keywords and returns its arguments."""

    def __init__(self) -> None:
        pass

    @classmethod
    def accepts(cls, spec: AttentionSpec, capability: Capability) -> Verdict:
        return Verdict.accept()

    def kv_layout(self) -> KVCacheLayout:
        return KVCacheLayout.keys_first(self.spec)

    def plan(self, batch: Any) -> Any:
        return batch

    def forward(self, query: Any, key: Any, value: Any, cache: Any, plan: Any) -> Any:
        return "plain", query, key, value, cache, plan


def former_methods() -> dict[str, Any]:
    """Return the methods of an earlier version, which return their names and arguments."""

    def forward_quantized(self: Any, *step: Any, out: Any = None) -> Any:
        return ("quantized", *step, out)

    def forward_with_sinks(self: Any, *step: Any) -> Any:
        return ("sinks", *step)

    def forward_quantized_with_sinks(self: Any, *step: Any) -> Any:
        return ("quantized sinks", *step)

    def forward_stored(
        self: Any, query: Any, cache: Any, plan: Any, scales: Any = None, sinks: Any = None
    ) -> Any:
        return "stored", query, cache, plan, scales, sinks

    return dict(locals())


def make_former(base: type[Any] = Plain, **members: Any) -> type[Any]:
    """Create a subclass with former methods, and check that this warns."""
    message = r"Former defines forward_.*\. Try: forward\(self,"
    with pytest.warns(DeprecationWarning, match=message) as warnings:
        backend: type[Any] = ABCMeta("Former", (base,), members)
    assert [warning.filename for warning in warnings] == [__file__]
    return backend


def test_forward_calls_the_method_for_its_keywords() -> None:
    backend = make_former(**former_methods())()
    assert backend.forward(*STEP) == ("plain", *STEP)
    assert backend.forward(*STEP, scales=1, out=2) == ("quantized", *STEP, 1, 2)
    assert backend.forward(*STEP, sinks=1) == ("sinks", *STEP, 1)
    assert backend.forward(*STEP, scales=1, sinks=2) == ("quantized sinks", *STEP, 1, 2)
    stored = backend.forward(*STEP, scales=1, sinks=2, stored=True)
    assert stored == ("stored", "query", "cache", "plan", 1, 2)


def test_only_the_keywords_of_the_methods_are_taken() -> None:
    methods = former_methods()
    sinks_only = make_former(forward_with_sinks=methods["forward_with_sinks"])
    assert sinks_only.takes("sinks")
    assert not sinks_only.takes("scales")
    with pytest.raises(TypeError, match="unexpected keyword argument 'scales'"):
        sinks_only().forward(*STEP, scales=1)
    # A subclass that overrides the plain method alone keeps the others.
    overridden = make_former(sinks_only, forward=lambda self, *step: ("overridden", *step))
    assert overridden().forward(*STEP) == ("overridden", *STEP)
    assert overridden().forward(*STEP, sinks=1) == ("sinks", *STEP, 1)


def test_keywords_of_the_parent_class_stay() -> None:
    class Parent(Plain):
        def forward(self, *step: Any, scales: Any = None, stored: bool = False) -> Any:
            return ("parent", *step, scales, stored)

    former = make_former(Parent, forward_with_sinks=former_methods()["forward_with_sinks"])
    assert all(map(former.takes, ("scales", "sinks", "stored")))
    assert not former.takes("out")
    assert former().forward(*STEP, scales=1) == ("parent", *STEP, 1, False)
    assert former().forward(*STEP, scales=1, stored=True) == ("parent", *STEP, 1, True)


def spec(**fields: Any) -> AttentionSpec:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_size": 64, "page_size": 16, "scale": 0.125}
    return AttentionSpec(
        **{"dtype": torch.float32, "cache_dtype": torch.float32, **sizes, **fields}
    )


@pytest.mark.parametrize(
    ("fields", "keyword"),
    [
        ({"cache_dtype": torch.int8}, "scales"),
        ({"sinks": True}, "sinks"),
        ({"shared": True}, "stored"),
        ({"type": "encoder_decoder"}, "stored"),
    ],
)
def test_a_missing_keyword_is_named(fields: dict[str, Any], keyword: str) -> None:
    Plain.check_keywords(spec())
    with pytest.raises(MissingMemberError, match=f"^Plain accepted .* no '{keyword}'. Try: add"):
        Plain.check_keywords(spec(**fields))
    make_former(**former_methods()).check_keywords(spec(**fields))


def test_other_keywords_come_from_the_parent_class() -> None:
    class Parent(Plain):
        def forward(self, *step: Any, sinks: Any = None) -> Any:
            return step

    class Passing(Parent):
        def forward(self, *step: Any, **options: Any) -> Any:
            return super().forward(*step, **options)

    class Closed(Passing):
        def forward(self, *step: Any) -> Any:  # type: ignore[override]
            return super().forward(*step)

    assert Passing.takes("sinks")
    assert not Passing.takes("stored")
    assert not Closed.takes("sinks")
